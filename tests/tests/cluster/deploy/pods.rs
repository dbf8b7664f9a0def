//! The pods that the manifests make.

use serde_json::{Value, json};

use crate::deploy::manifests::{DRIVERS, Manifests};

/// The workloads, each with the spec of its pods.
fn workloads(manifests: &Manifests) -> Vec<(&str, &Value)> {
    let all = manifests.of_kind("Deployment").chain(manifests.of_kind("DaemonSet"));
    all.map(|object| (object["metadata"]["name"].as_str().unwrap(), &object["spec"]["template"]["spec"]))
        .collect()
}

#[test]
fn every_container_has_a_read_only_root_requests_probes_and_a_fixed_image() {
    let all = DRIVERS.map(Manifests::build);
    let workloads: Vec<_> = all.iter().flat_map(workloads).collect();
    assert_eq!(workloads.len(), 11);
    for (name, spec) in workloads {
        assert!(
            spec["priorityClassName"].as_str().is_some_and(|class| class.ends_with("-critical")),
            "{name}"
        );
        assert!(spec["tolerations"].is_array() && spec["serviceAccountName"].is_string(), "{name}");
        for container in spec["containers"].as_array().unwrap() {
            assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true, "{name}");
            assert!(container["resources"]["requests"]["memory"].is_string(), "{name}");
            assert!(container["resources"]["requests"]["cpu"].is_string(), "{name}");
            let probe = &container["livenessProbe"]["httpGet"];
            assert!(probe["path"].as_str().is_some_and(|path| path.starts_with("/healthz")), "{name}");
            assert_eq!(probe["port"], container["ports"][0]["name"], "{name}");
            // What a pod serves in the node's network would be for everybody who reaches the node.
            let host = if spec["hostNetwork"] == true { "127.0.0.1" } else { "" };
            assert_eq!(probe["host"].as_str().unwrap_or_default(), host, "{name}");
            let endpoint = format!("--http-endpoint={host}:{}", container["ports"][0]["containerPort"]);
            assert!(container["args"].as_array().unwrap().contains(&json!(endpoint)), "{name}");
            let (_, tag) = container["image"].as_str().unwrap().rsplit_once(':').unwrap();
            assert_eq!(tag, env!("CARGO_PKG_VERSION"), "{name}");
        }
    }
}

/// The profile "restricted" of the Pod Security Standards, as far as these pods can break it.
#[test]
fn all_pods_but_the_drivers_fit_restricted_pod_security() {
    let all = DRIVERS.map(Manifests::build);
    let (mut restricted, mut privileged) = (Vec::new(), Vec::new());
    for (name, spec) in all.iter().flat_map(workloads) {
        let containers = spec["containers"].as_array().unwrap();
        assert!(spec["initContainers"].is_null(), "{name}: look at these too");
        if containers.iter().any(|container| container["securityContext"]["privileged"] == true) {
            privileged.push(name);
            continue;
        }
        restricted.push(name);
        for host in ["hostNetwork", "hostPID", "hostIPC"] {
            assert!(spec[host].is_null(), "{name}: {host}");
        }
        for volume in spec["volumes"].as_array().into_iter().flatten() {
            assert!(volume["emptyDir"].is_object(), "{name}: {volume}");
        }
        let pod = &spec["securityContext"];
        assert_eq!(pod["runAsNonRoot"], true, "{name}");
        assert!(pod["runAsUser"].as_u64().is_some_and(|user| user > 0), "{name}");
        assert_eq!(pod["seccompProfile"]["type"], "RuntimeDefault", "{name}");
        for container in containers {
            let own = &container["securityContext"];
            assert_eq!(own["allowPrivilegeEscalation"], false, "{name}");
            assert_eq!(own["capabilities"], json!({"drop": ["ALL"]}), "{name}");
            assert!(container["ports"].as_array().unwrap().iter().all(|port| port["hostPort"].is_null()));
        }
    }
    let twice = "berth-snapshot-controller";
    let [nfs, digitalocean, aliyun] =
        ["berth-nfs-controller", "berth-digitalocean-controller", "berth-aliyun-controller"];
    assert_eq!(restricted, [twice, nfs, twice, digitalocean, twice, aliyun, twice]);
    assert_eq!(privileged, ["berth-local", "berth-nfs-node", "berth-digitalocean-node", "berth-aliyun-node"]);
}

/// All of them make filesystems on devices that come and go, also that of NFS (`kind: image`).
#[test]
fn drivers_on_nodes_have_the_tools_and_the_devices_of_filesystems() {
    for driver in DRIVERS {
        let manifests = Manifests::build(driver);
        let drivers: Vec<_> = manifests.of_kind("DaemonSet").collect();
        assert_eq!(drivers.len(), 1, "{driver}");
        let spec = &drivers[0]["spec"]["template"]["spec"];
        let container = &spec["containers"][0];
        let image = container["image"].as_str().unwrap();
        assert_eq!(image.rsplit_once(':').unwrap().0, "berth-node", "{driver}");
        let mounts = container["volumeMounts"].as_array().unwrap();
        let mount = mounts.iter().find(|mount| mount["mountPath"] == "/dev").expect(driver);
        let volumes = spec["volumes"].as_array().unwrap();
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
        assert_eq!(volume["hostPath"]["path"], "/dev", "{driver}");
    }
}

#[test]
fn inline_nfs_volumes_are_off_unless_somebody_turns_them_on() {
    let manifests = Manifests::build("nfs");
    let driver = manifests.of_kind("CSIDriver").next().unwrap();
    assert_eq!(driver["spec"]["volumeLifecycleModes"], json!(["Persistent"]));
}
