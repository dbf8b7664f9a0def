//! Upstream's cases: which pods are endpoints, how ready they are, and what is written for that.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{EndpointAddress, Endpoints, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};

use super::plan::{EndpointsByPorts, Step, endpoints, mirrored, plan, selected};
use berth_core::names::{ENDPOINT_SLICE_CONTROLLER, ENDPOINT_SLICE_MIRRORING_CONTROLLER};

fn service(spec: &Value) -> Service {
    let object = json!({ "metadata": { "name": "web", "namespace": "shop", "uid": "s" }, "spec": spec });
    serde_json::from_value(object).unwrap()
}

fn pod(name: &str, address: &str, ready: bool) -> Value {
    json!({
        "metadata": { "name": name, "namespace": "shop", "uid": name, "labels": { "app": "web" } },
        "spec": {
            "nodeName": "n", "hostname": name, "subdomain": "web",
            "containers": [{ "name": "main", "ports": [{ "name": "http", "containerPort": 8080 }] }],
        },
        "status": {
            "phase": "Running", "podIP": address,
            "conditions": [{ "type": "Ready", "status": if ready { "True" } else { "False" } }],
        },
    })
}

fn wanted(service: &Service, pods: &[Value]) -> EndpointsByPorts {
    let pods: Vec<Arc<Pod>> =
        pods.iter().map(|pod| Arc::new(serde_json::from_value(pod.clone()).unwrap())).collect();
    selected(service, &pods)
}

fn only(wanted: &EndpointsByPorts) -> Value {
    assert_eq!(wanted.len(), 1, "{wanted:?}");
    let (ports, endpoints) = wanted.values().next().unwrap();
    let short = |endpoint: &k8s_openapi::api::discovery::v1::Endpoint| {
        let conditions = endpoint.conditions.clone().unwrap();
        json!([
            endpoint.addresses[0],
            endpoint.hostname,
            conditions.ready,
            conditions.serving,
            conditions.terminating
        ])
    };
    let ports: Vec<_> = ports.iter().map(|port| port.port).collect();
    json!([ports, endpoints.iter().map(short).collect::<Vec<_>>()])
}

#[test]
fn ready_pods_are_endpoints_and_others_are_said_not_to_be_ready() {
    let web =
        service(&json!({ "selector": { "app": "web" }, "ports": [{ "port": 80, "targetPort": "http" }] }));
    let mut terminating = pod("web-2", "127.9.8.3", true);
    terminating["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let mut over = pod("over", "127.9.8.4", false);
    over["status"]["phase"] = json!("Succeeded");
    let mut other = pod("other", "127.9.8.5", true);
    other["metadata"]["labels"]["app"] = json!("db");
    let mut waiting = pod("waiting", "", false);
    waiting["status"] = json!({});
    let pods = [
        pod("web-1", "127.9.8.2", false),
        pod("web-0", "127.9.8.1", true),
        terminating,
        over,
        other,
        waiting,
    ];
    assert_eq!(
        only(&wanted(&web, &pods)),
        json!([
            [8080],
            [
                ["127.9.8.1", "web-0", true, true, false],
                ["127.9.8.2", "web-1", false, false, false],
                ["127.9.8.3", "web-2", false, true, true],
            ]
        ])
    );
    let subsets = endpoints(&web, &wanted(&web, &pods)).subsets.unwrap();
    assert_eq!(subsets.len(), 1);
    assert_eq!(subsets[0].addresses.as_ref().unwrap().len(), 1);
    assert_eq!(subsets[0].not_ready_addresses.as_ref().unwrap()[0].ip, "127.9.8.2");
    let eager = service(&json!({
        "clusterIP": "None", "selector": { "app": "web" }, "publishNotReadyAddresses": true,
    }));
    assert_eq!(
        only(&wanted(&eager, &pods[..3])),
        json!([
            [],
            [
                ["127.9.8.1", "web-0", true, true, false],
                ["127.9.8.2", "web-1", true, false, false],
                ["127.9.8.3", "web-2", true, true, true],
            ]
        ])
    );
}

#[test]
fn pods_whose_named_port_differs_are_in_slices_of_their_own() {
    let web =
        service(&json!({ "selector": { "app": "web" }, "ports": [{ "port": 80, "targetPort": "http" }] }));
    let mut other = pod("web-1", "127.9.8.2", true);
    other["spec"]["containers"][0]["ports"][0]["containerPort"] = json!(9090);
    let mut without = pod("web-2", "127.9.8.3", true);
    without["spec"]["containers"][0]["ports"] = json!([]);
    let wanted = wanted(&web, &[pod("web-0", "127.9.8.1", true), other, without]);
    assert_eq!(wanted.len(), 3);
    assert_eq!(plan(&web, &wanted, &[], ENDPOINT_SLICE_CONTROLLER, None).len(), 3);
}

fn created(steps: Vec<Step>) -> Vec<Arc<EndpointSlice>> {
    let slices = steps.into_iter().map(|step| match step {
        Step::Create(slice) => *slice,
        other => panic!("{other:?}"),
    });
    let named = slices.enumerate().map(|(index, mut slice)| {
        slice.metadata.name = Some(format!("web-{index}"));
        Arc::new(slice)
    });
    named.collect()
}

#[test]
fn slices_are_written_once_and_follow_the_pods() {
    let web = service(&json!({ "selector": { "app": "web" }, "ports": [{ "port": 80 }] }));
    let none = created(plan(&web, &EndpointsByPorts::new(), &[], ENDPOINT_SLICE_CONTROLLER, None));
    assert_eq!(none.len(), 1, "a Service without endpoints has a slice that says so");
    assert!(plan(&web, &EndpointsByPorts::new(), &none, ENDPOINT_SLICE_CONTROLLER, None).is_empty());
    let one = wanted(&web, &[pod("web-0", "127.9.8.1", true)]);
    assert!(matches!(plan(&web, &one, &none, ENDPOINT_SLICE_CONTROLLER, None)[..], [Step::Update(..)]));
    let many: Vec<Value> =
        (0..250).map(|n| pod(&format!("web-{n:03}"), &format!("127.9.8.{n}"), true)).collect();
    let many = wanted(&web, &many);
    let slices = created(plan(&web, &many, &[], ENDPOINT_SLICE_CONTROLLER, None));
    let sizes: Vec<usize> = slices.iter().map(|slice| slice.endpoints.as_ref().unwrap().len()).collect();
    assert_eq!(sizes, [100, 100, 50]);
    assert!(plan(&web, &many, &slices, ENDPOINT_SLICE_CONTROLLER, None).is_empty());
    assert!(matches!(
        plan(&web, &one, &slices, ENDPOINT_SLICE_CONTROLLER, None)[..],
        [Step::Update(..), Step::Delete(_), Step::Delete(_)]
    ));
    let foreign: Vec<_> = slices
        .iter()
        .map(|slice| {
            let mut slice = slice.as_ref().clone();
            slice.metadata.labels = None;
            Arc::new(slice)
        })
        .collect();
    assert!(matches!(plan(&web, &one, &foreign, ENDPOINT_SLICE_CONTROLLER, None)[..], [Step::Create(_)]));
}

#[test]
fn endpoints_that_somebody_wrote_are_mirrored() {
    let web = service(&json!({ "ports": [{ "port": 80 }] }));
    let written: Endpoints = serde_json::from_value(json!({
        "metadata": { "name": "web", "namespace": "shop", "uid": "e" },
        "subsets": [{ "addresses": [{ "ip": "192.0.2.1" }], "ports": [{ "port": 8080 }] }],
    }))
    .unwrap();
    let wanted = mirrored(&web, Some(&written));
    let slices = created(plan(&web, &wanted, &[], ENDPOINT_SLICE_MIRRORING_CONTROLLER, Some(&written)));
    assert_eq!(slices[0].endpoints.as_ref().unwrap()[0].addresses, ["192.0.2.1"]);
    assert_eq!(slices[0].metadata.owner_references.as_ref().unwrap()[0].kind, "Endpoints");
    assert!(matches!(
        plan(&web, &mirrored(&web, None), &slices, ENDPOINT_SLICE_MIRRORING_CONTROLLER, None)[..],
        [Step::Delete(_)]
    ));
    // A slice holds addresses of one family.
    let mut both = written.clone();
    let more = json!([{ "ip": "2001:db8::1" }, { "ip": "192.0.2.2" }, { "ip": "nonsense" }]);
    let more: Vec<EndpointAddress> = serde_json::from_value(more).unwrap();
    both.subsets.as_mut().unwrap()[0].addresses.as_mut().unwrap().extend(more);
    let wanted = mirrored(&web, Some(&both));
    let steps = plan(&web, &wanted, &slices, ENDPOINT_SLICE_MIRRORING_CONTROLLER, Some(&both));
    let [Step::Update(_, changed), Step::Create(new)] = &steps[..] else { panic!("{steps:?}") };
    let held = |slice: &EndpointSlice| -> (String, Vec<String>) {
        let endpoints = slice.endpoints.iter().flatten();
        (slice.address_type.clone(), endpoints.map(|endpoint| endpoint.addresses[0].clone()).collect())
    };
    let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    assert_eq!(held(changed), ("IPv4".to_owned(), named(&["192.0.2.1", "192.0.2.2"])));
    assert_eq!(held(new), ("IPv6".to_owned(), named(&["2001:db8::1"])));
    let mut skipped = written.clone();
    skipped.metadata.labels =
        Some([("endpointslice.kubernetes.io/skip-mirror".to_owned(), "true".to_owned())].into());
    assert!(mirrored(&web, Some(&skipped)).is_empty());
}
