//! The programs of the manifests, run as the manifests run them, with what their roles allow them and nothing else.

use std::collections::BTreeSet;
use std::fs;

use berth_e2e::driver;
use berth_e2e::program::Program;
use serde_json::{Value, json};

use crate::deploy::cluster::{At, Cluster, write_kubeconfig};
use crate::deploy::door::Door;
use crate::deploy::manifests::Manifests;
use crate::deploy::roles::Allowed;
use crate::deploy::scenario;

/// What every Secret of these clusters holds.
pub(crate) const SECRET: &str = "berth";

/// The nodes of the cluster.
pub(crate) const NODES: [&str; 2] = ["node-1", "node-2"];

/// Starts the only container of a workload as the kubelet would for a pod on a node, but for paths and ports.
pub(crate) fn start(cluster: &Cluster, workload: &Value, node: &str, door: &Door, more: &[&str]) -> Program {
    let name = format!("{}-{node}", workload["metadata"]["name"].as_str().unwrap());
    let dir = cluster.path(node);
    fs::create_dir_all(dir.join("kubelet/plugins_registry")).unwrap();
    let container = &workload["spec"]["template"]["spec"]["containers"][0];
    let place = |name: &str| {
        fs::create_dir_all(dir.join(name)).unwrap();
        dir.join(name).display().to_string()
    };
    let places = [
        ("/var/lib/kubelet", place("kubelet")),
        ("/var/lib/berth", place("data")),
        ("/run/berth", place("run")),
    ];
    let mut args: Vec<String> = container["args"]
        .as_array()
        .unwrap()
        .iter()
        .map(|arg| {
            let arg = arg.as_str().unwrap().to_owned();
            let arg = places.iter().fold(arg, |arg, (there, here)| arg.replace(there, here));
            if arg.starts_with("--http-endpoint=") { "--http-endpoint=127.0.0.1:0".to_owned() } else { arg }
        })
        .collect();
    args.extend(more.iter().map(ToString::to_string));
    let kubeconfig = cluster.path(&format!("{name}.kubeconfig"));
    write_kubeconfig(&kubeconfig, &format!("http://{}", door.address));
    let mut environment = vec![("KUBECONFIG".to_owned(), kubeconfig.display().to_string())];
    for variable in container["env"].as_array().into_iter().flatten() {
        let from = &variable["valueFrom"];
        let value = match from["fieldRef"]["fieldPath"].as_str() {
            _ if variable["value"].is_string() => variable["value"].as_str().unwrap().to_owned(),
            Some("spec.nodeName") => node.to_owned(),
            Some("metadata.name") => name.clone(),
            Some("metadata.namespace") => "berth-system".to_owned(),
            None if from["secretKeyRef"].is_object() => SECRET.to_owned(),
            _ => panic!("the kubelet would know {from}"),
        };
        environment.push((variable["name"].as_str().unwrap().to_owned(), value));
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let environment: Vec<(&str, &str)> =
        environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let log = cluster.path(&format!("{name}.log"));
    Program::start(&driver::binary().unwrap(), &args, &environment, log).unwrap()
}

/// What the kubelet and the DaemonSet's controller would make: nodes with their places, and the driver's pods.
async fn create_objects(cluster: &Cluster) {
    let set = At { namespace: "berth-system", ..At::cluster("apps/v1", "DaemonSet", "berth-local") };
    let uid = cluster.find(&set).await.unwrap()["metadata"]["uid"].clone();
    for node in NODES {
        let labels = json!({"metadata": {"labels": {"topology.berth.dev/node": node}}});
        cluster.create(&At::cluster("v1", "Node", node), labels).await;
        let owner = json!({
            "apiVersion": "apps/v1", "kind": "DaemonSet", "name": "berth-local", "uid": uid, "controller": true,
        });
        let pod = json!({
            "metadata": {"ownerReferences": [owner]},
            "spec": {"nodeName": node, "containers": [{"name": "driver", "image": "berth-node"}]},
        });
        let at = At { namespace: "berth-system", ..At::cluster("v1", "Pod", &format!("berth-local-{node}")) };
        cluster.create(&at, pod).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn roles_allow_what_the_programs_do_and_nothing_else() {
    let local = Manifests::build("local");
    let cluster = Cluster::start().await;
    cluster.apply(&Manifests::build("snapshot-crds").served(), &[]);
    cluster.apply(&local.served(), &[]);
    create_objects(&cluster).await;
    let door = |account| Door::open(cluster.client.clone(), Allowed::to(account, &local));
    let (drivers, snapshots) = (door("berth-local").await, door("berth-snapshot-controller").await);

    // Directories need no loop devices, and the parameter has no effect.
    let plain = [
        "--kind=dir",
        "--accepted-mutable-parameter-names=tier",
        "--node-deployment-base-delay=100ms",
        "--node-deployment-max-delay=1s",
    ];
    let set = local.get("DaemonSet", "berth-local");
    let mut programs: Vec<Program> =
        NODES.iter().map(|node| start(&cluster, set, node, &drivers, &plain)).collect();
    let deployment = local.get("Deployment", "berth-snapshot-controller");
    programs.push(start(&cluster, deployment, "control-plane", &snapshots, &[]));
    for program in &mut programs {
        program.says("serving HTTP").await.unwrap();
    }
    tokio::select! {
        () = scenario::play(&cluster) => {}
        what = drivers.refusal() => panic!("the drivers may not {what}"),
        what = snapshots.refusal() => panic!("the snapshot controller may not {what}"),
    }

    for program in programs {
        program.stop().await.unwrap();
    }
    for (account, door) in [("berth-local", &drivers), ("berth-snapshot-controller", &snapshots)] {
        assert_eq!(door.unused(), BTreeSet::new(), "{account} may do this, and never does");
    }
    cluster.finish().await;
}
