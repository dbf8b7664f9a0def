//! Names, delays and reach of a node's own provisioner.

use serde_json::json;

use super::*;

fn own_node(segment: Option<&[(&str, &str)]>) -> OwnNode {
    let segment = segment.map(|pairs| pairs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect());
    OwnNode::new(PerNode::new("n1"), NodeTopology(segment))
}

#[test]
fn the_manager_of_capacity_objects_is_named_as_upstream_names_it() {
    assert_eq!(manager(None), "external-provisioner");
    assert_eq!(manager(Some("worker-1")), "external-provisioner-worker-1");
    // FNV-1a of the empty text is its offset basis, of "a" a published value.
    assert_eq!((hash("").as_str(), hash("a").as_str()), ("811c9dc5", "e40c292c"));
    let fits = "n".repeat(42);
    assert_eq!(manager(Some(&fits)), format!("external-provisioner-{fits}"));
    let long = "n".repeat(43);
    assert_eq!(manager(Some(&long)), format!("external-p-{}-{long}", hash("external-provisioner")));
    let longer = "n".repeat(53);
    let whole = hash(&format!("external-provisioner-{longer}"));
    assert_eq!(manager(Some(&longer)), format!("external-provisioner-{whole}"));
    for length in 1..=253 {
        assert!(manager(Some(&"n".repeat(length))).len() <= 63, "a label's value is no longer");
    }
}

#[test]
fn each_node_marks_claims_with_a_finalizer_of_its_own() {
    assert_eq!(claim_finalizer("d.example.com", None), "creating.berth.dev/d.example.com");
    assert_eq!(claim_finalizer("d.example.com", Some("n1")), "creating.berth.dev/d.example.com_n1");
    let (one, other) = ("n".repeat(252) + "1", "n".repeat(252) + "2");
    let finalizers = [&one, &other].map(|node| claim_finalizer("d.example.com", Some(node)));
    assert_ne!(finalizers[0], finalizers[1]);
    for finalizer in finalizers {
        assert_eq!(finalizer.trim_start_matches("creating.berth.dev/").len(), LONGEST_NAME);
    }
}

#[test]
fn the_first_attempt_waits_up_to_the_base_delay_and_each_further_one_twice_as_long() {
    let options = PerNode::new("n1");
    let seconds = |attempt, chance| options.delay(attempt, chance).as_secs();
    assert_eq!((seconds(0, 0.0), seconds(0, 0.5), seconds(0, 1.0)), (20, 10, 0));
    assert_eq!((seconds(1, 0.0), seconds(1, 1.0)), (40, 20));
    assert_eq!((seconds(2, 0.0), seconds(2, 1.0)), (60, 40));
    assert_eq!(seconds(40, 0.0), 60);
    assert!((0..100).map(|_| berth_core::random_fraction()).all(|chance| (0.0..=1.0).contains(&chance)));
}

#[tokio::test(start_paused = true)]
async fn a_claim_waits_for_its_time_however_often_it_is_reconciled() {
    let own_node = own_node(None);
    let first = own_node.rest("uid");
    assert!(first <= Duration::from_secs(20));
    assert_eq!(own_node.rest("uid"), first);
    tokio::time::advance(first).await;
    assert_eq!(own_node.rest("uid"), Duration::ZERO);
    let second = own_node.wait_again("uid");
    assert!(second >= Duration::from_secs(20) && second <= Duration::from_secs(40), "{second:?}");
    assert_eq!(own_node.rest("uid"), second);
    own_node.forget("uid");
    assert!(own_node.rest("uid") <= Duration::from_secs(20), "begins anew");
}

#[test]
fn a_volume_is_reached_where_its_affinity_says() {
    let volume = |expression: serde_json::Value| -> PersistentVolume {
        let terms = json!([{ "matchExpressions": [expression] }]);
        let affinity = json!({ "required": { "nodeSelectorTerms": terms } });
        serde_json::from_value(json!({ "metadata": {}, "spec": { "nodeAffinity": affinity } })).unwrap()
    };
    let on = |operator: &str, values: &[&str]| {
        volume(json!({ "key": "host", "operator": operator, "values": values }))
    };
    let own_node = own_node(Some(&[("host", "n1")]));
    assert!(own_node.reaches(&on("In", &["n1"])) && own_node.reaches(&on("In", &["n0", "n1"])));
    assert!(!own_node.reaches(&on("In", &["n2"])));
    assert!(own_node.reaches(&on("NotIn", &["n2"])) && !own_node.reaches(&on("NotIn", &["n1"])));
    assert!(own_node.reaches(&on("Exists", &[])) && !own_node.reaches(&on("DoesNotExist", &[])));
    assert!(!own_node.reaches(&on("Like", &["n1"])));
    let fields = json!({ "required": { "nodeSelectorTerms": [
        { "matchFields": [{ "key": "metadata.name", "operator": "In", "values": ["n1"] }] }, {},
    ] } });
    let fields = json!({ "metadata": {}, "spec": { "nodeAffinity": fields } });
    assert!(!own_node.reaches(&serde_json::from_value(fields).unwrap()));
    assert!(own_node.reaches(&PersistentVolume::default()), "no affinity: anywhere");
    assert!(
        super::tests::own_node(None).reaches(&on("In", &["n2"])),
        "a driver without topology reaches all"
    );
}

#[test]
fn the_nodes_own_objects_say_what_the_driver_says() {
    let (csi_node, node) = own_node(Some(&[("host", "n1"), ("zone", "z")])).objects("d");
    let segments = crate::provisioner::topology::keys_of(&csi_node, "d");
    assert_eq!(segments.into_iter().collect::<Vec<_>>(), ["host", "zone"]);
    assert_eq!((node.name_any().as_str(), node.labels()["host"].as_str()), ("n1", "n1"));
}
