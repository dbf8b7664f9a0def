//! Whoever has the role of `deploy/ui` can use the page, `berth top`, `berth doctor` and `berth explain`; and nobody can change anything
//! with it.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use berth_e2e::browser::request;
use berth_e2e::program::Program;
use berth_e2e::{driver, machine};
use serde_json::{Value, json};

use crate::deploy::cluster::{At, Cluster, pause, write_kubeconfig};
use crate::deploy::door::Door;
use crate::deploy::manifests::Manifests;
use crate::deploy::roles::Allowed;

/// The role of those who look.
fn role() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/ui/rbac.yaml");
    serde_saphyr::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A node, and storage of a driver that Berth does not know: a volume in use, and a claim that nobody serves.
async fn create_objects(cluster: &Cluster) {
    let storage = "storage.k8s.io/v1";
    cluster.create(&At::cluster("v1", "Node", "node-1"), json!({})).await;
    let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
    cluster.merge_status(&At::cluster("v1", "Node", "node-1"), ready).await;
    let drivers = json!([{"name": "other.example.com", "nodeID": "node-1", "topologyKeys": null}]);
    cluster.create(&At::cluster(storage, "CSINode", "node-1"), json!({"spec": {"drivers": drivers}})).await;
    cluster
        .create(
            &At::cluster(storage, "CSIDriver", "other.example.com"),
            json!({"spec": {"attachRequired": true}}),
        )
        .await;
    cluster
        .create(&At::cluster(storage, "StorageClass", "other"), json!({"provisioner": "other.example.com"}))
        .await;
    let spec = json!({
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "other",
        "csi": {"driver": "other.example.com", "volumeHandle": "handle"},
        "claimRef": {"namespace": "default", "name": "data"},
    });
    cluster.create(&At::volume("pv"), json!({"spec": spec})).await;
    for (name, class, volume) in [("data", "other", "pv"), ("stuck", "absent", "")] {
        let spec = json!({
            "storageClassName": class, "volumeName": volume, "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        });
        cluster.create(&At::claim(name), json!({"spec": spec})).await;
    }
    cluster.until(&At::claim("data"), "gets bound", |claim| claim["status"]["phase"] == "Bound").await;
}

fn berth(cluster: &Cluster, kubeconfig: &str, args: &[&str]) -> Output {
    let mut command = machine::command(driver::binary().unwrap());
    command.args(args).arg(format!("--kubeconfig={kubeconfig}")).env_remove("KUBECONFIG");
    // Nothing of a `berth up` that this machine may have.
    command.env("BERTH_DATA_DIR", cluster.path("none")).stdin(Stdio::null());
    command.output().unwrap()
}

/// Opens the page by its link; gives where it is and the cookie.
fn enter(link: &str) -> (u16, String, String) {
    let (host, token) = link.trim_start_matches("http://").split_once("/?token=").unwrap();
    let port: u16 = host.rsplit(':').next().unwrap().parse().unwrap();
    (port, host.to_owned(), format!("berth-{port}={token}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_role_of_viewers_is_enough_to_look_and_allows_no_change() {
    let cluster = Cluster::start().await;
    cluster.apply(&Manifests::build("snapshot-crds").served(), &[]);
    create_objects(&cluster).await;
    cluster.apply(&[role()], &[]);
    let door = Door::open(cluster.client.clone(), Allowed::in_role(&role())).await;
    let path = cluster.path("viewer.kubeconfig");
    write_kubeconfig(&path, &format!("http://{}", door.address));
    let kubeconfig = path.display().to_string();

    let looked = async {
        let text = |output: Output| {
            (
                String::from_utf8_lossy(&output.stdout).into_owned(),
                String::from_utf8_lossy(&output.stderr).into_owned(),
            )
        };
        let run = |args: &'static [&'static str]| {
            tokio::task::block_in_place(|| text(berth(&cluster, &kubeconfig, args)))
        };
        let (said, complaint) = run(&["doctor"]);
        assert!(
            said.contains("PersistentVolumeClaim default/stuck") && !said.contains("Not examined: Pers"),
            "{said}{complaint}"
        );
        let (said, complaint) = run(&["top", "--once"]);
        assert!(said.contains("default/data") && said.contains("No such class"), "{said}{complaint}");
        for what in ["pvc/stuck", "pv/pv", "node/node-1", "sc/other", "csidriver/other.example.com"] {
            let output = tokio::task::block_in_place(|| berth(&cluster, &kubeconfig, &["explain", what]));
            assert!(matches!(output.status.code(), Some(0 | 3)), "{what}: {output:?}");
        }
        // The page watches all that it shows.
        let args = ["ui", "--listen=127.0.0.1:0", &format!("--kubeconfig={kubeconfig}")];
        let log = cluster.path("ui.log");
        let mut page = Program::start(&driver::binary().unwrap(), &args, &[], log).unwrap();
        let (port, host, cookie) = enter(&page.says("http://").await.unwrap());
        let live = format!("GET /api/live HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\n\r\n");
        let (shown, stream) = tokio::task::spawn_blocking(move || first_rows(port, &live)).await.unwrap();
        assert!(shown.contains("default/stuck") && shown.contains("class-missing"), "{shown}");
        // Kinds that a cluster may lack are not waited for.
        let deadline = Instant::now() + Duration::from_secs(60);
        while !unused(&door).is_empty() {
            assert!(Instant::now() < deadline, "viewers may do this, and never do: {:?}", unused(&door));
            pause().await;
        }
        drop(stream);
        page.stop().await.unwrap();
    };
    tokio::select! {
        () = looked => {}
        what = door.refusal() => panic!("who looks may not {what}"),
    }
    a_change_needs_more(&cluster, &kubeconfig).await;
    cluster.finish().await;
}

/// What is allowed and was never asked, but for what people need who type the commands that are advised, such as `kubectl get`.
fn unused(door: &Door) -> BTreeSet<String> {
    let of_kubectl = |what: &String| what.starts_with("get ") && what != "get nodes/proxy";
    door.unused().into_iter().filter(|what| !of_kubectl(what)).collect()
}

/// Reads the stream of the page until it tells of volumes; gives what it said, and the stream.
fn first_rows(port: u16, request: &str) -> (String, TcpStream) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let (mut text, mut bytes) = (String::new(), [0; 16384]);
    while !(text.contains("\"rows\":[{") && text.contains("\"attention\":[{")) {
        match stream.read(&mut bytes) {
            Ok(0) | Err(_) => break,
            Ok(count) => text.push_str(&String::from_utf8_lossy(&bytes[..count])),
        }
    }
    (text, stream)
}

/// What a viewer does is done with the viewer's own rights, so this role is refused.
async fn a_change_needs_more(cluster: &Cluster, kubeconfig: &str) {
    let args = ["ui", "--allow-actions", "--listen=127.0.0.1:0", &format!("--kubeconfig={kubeconfig}")];
    let mut page =
        Program::start(&driver::binary().unwrap(), &args, &[], cluster.path("acting.log")).unwrap();
    let (port, host, cookie) = enter(&page.says("http://").await.unwrap());
    for body in [
        r#"{"action":"delete","id":"default/data","confirm":"data"}"#,
        r#"{"action":"expand","id":"default/data","size":"2Gi"}"#,
        r#"{"action":"clone","id":"default/data","name":"copy"}"#,
        r#"{"action":"snapshot","id":"default/data","name":"then"}"#,
    ] {
        let act = format!(
            "POST /api/act HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nCookie: {cookie}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let (status, said) = tokio::task::spawn_blocking(move || request(port, &act)).await.unwrap().unwrap();
        assert_eq!(status, 403, "{body}: {said}");
        assert!(said.contains("Forbidden"), "{said}");
    }
    page.stop().await.unwrap();
    let claim = cluster.find(&At::claim("data")).await.unwrap();
    assert!(claim["metadata"]["deletionTimestamp"].is_null(), "{claim:#}");
    assert_eq!(claim["spec"]["resources"]["requests"]["storage"], "1Gi");
    assert_eq!(cluster.list(&At::claim("")).await.len(), 2);
}
