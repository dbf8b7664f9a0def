//! Volumes: the spec's errors, what a repeated call does, and how calls exclude each other.

use berth_csi::v1::{
    ControllerExpandVolumeRequest, ControllerGetVolumeHealthRequest, ControllerGetVolumeRequest,
    ControllerListVolumeHealthRequest, ControllerModifyVolumeRequest, ControllerPublishVolumeRequest,
    ControllerUnpublishVolumeRequest, CreateVolumeRequest, DeleteVolumeRequest, GetCapacityRequest,
    ListVolumesRequest, Topology, ValidateVolumeCapabilitiesRequest, VolumeContentSource,
    controller_server::Controller as _,
    volume_content_source::{SnapshotSource, Type, VolumeSource},
};
use tonic::Code;

use super::{fake::MUTABLE, *};
use crate::{
    Error,
    locks::{Hold, Key},
};

fn from_volume(id: &str) -> Option<VolumeContentSource> {
    Some(VolumeContentSource { r#type: Some(Type::Volume(VolumeSource { volume_id: id.into() })) })
}

fn from_snapshot(id: &str) -> Option<VolumeContentSource> {
    Some(VolumeContentSource { r#type: Some(Type::Snapshot(SnapshotSource { snapshot_id: id.into() })) })
}

fn delete(id: &str) -> DeleteVolumeRequest {
    DeleteVolumeRequest { volume_id: id.into(), ..Default::default() }
}

fn attach(id: &str, node: &str) -> ControllerPublishVolumeRequest {
    ControllerPublishVolumeRequest {
        volume_id: id.into(),
        node_id: node.into(),
        volume_capability: Some(mounted(SNW)),
        ..Default::default()
    }
}

fn detach(id: &str, node: &str) -> ControllerUnpublishVolumeRequest {
    ControllerUnpublishVolumeRequest { volume_id: id.into(), node_id: node.into(), ..Default::default() }
}

/// A row of CreateVolume's table: what it is about, how the request differs, the code, a word of the message.
type Row = (&'static str, Change<CreateVolumeRequest>, Code, &'static str);

async fn check_rows(bench: &Bench, name: &str, rows: &[Row]) {
    for (row, change, code, word) in rows {
        let mut request = create(name);
        change(&mut request);
        let message = refused(row, bench.driver.create_volume(of(request)).await, *code);
        assert!(message.contains(word), "{row}: {word:?} in {message:?}");
    }
}

#[tokio::test]
async fn create_volume_answers_the_rows_of_its_error_table() {
    let bench = Bench::new();
    bench.volume(create("source")).await;
    let rows: [Row; 11] = [
        ("no name", |r| r.name.clear(), Code::InvalidArgument, "name"),
        ("a name of 129 bytes", |r| r.name = "n".repeat(129), Code::InvalidArgument, "128"),
        ("no capabilities", |r| r.volume_capabilities.clear(), Code::InvalidArgument, "volume_capabilities"),
        ("block and mount", |r| r.volume_capabilities.push(raw(SNW)), Code::InvalidArgument, "one of them"),
        ("a parameter unknown", |r| r.parameters = pairs(&[("x", "y")]), Code::InvalidArgument, "\"x\""),
        (
            "a mutable one unknown",
            |r| r.mutable_parameters = pairs(&[("x", "y")]),
            Code::InvalidArgument,
            "\"x\"",
        ),
        (
            "source volume missing",
            |r| r.volume_content_source = from_volume("no"),
            Code::NotFound,
            "volume \"no\"",
        ),
        (
            "source snapshot missing",
            |r| r.volume_content_source = from_snapshot("no"),
            Code::NotFound,
            "snapshot",
        ),
        (
            "source of the other kind",
            |r| {
                r.volume_content_source = from_volume("vol-source");
                r.volume_capabilities = vec![raw(SNW)];
            },
            Code::InvalidArgument,
            "block access",
        ),
        (
            "limit below the source",
            |r| {
                r.volume_content_source = from_volume("vol-source");
                r.capacity_range = range(0, GIB - 1);
            },
            Code::OutOfRange,
            "limit_bytes",
        ),
        (
            "another topology",
            |r| r.accessibility_requirements = places("there"),
            Code::ResourceExhausted,
            "there",
        ),
    ];
    check_rows(&bench, "new", &rows).await;
    assert_eq!(bench.fake.state().volumes.len(), 1, "nothing was made by what was refused");
}

#[tokio::test]
async fn create_volume_says_in_what_an_existing_volume_differs() {
    let bench = Bench::new();
    bench.volume(create("taken")).await;
    let rows: [Row; 5] = [
        (
            "exists larger",
            |r| {
                r.capacity_range = range(2 * GIB, 0);
            },
            Code::AlreadyExists,
            "size",
        ),
        (
            "exists with another source",
            |r| {
                r.volume_content_source = from_volume("vol-source");
            },
            Code::AlreadyExists,
            "source",
        ),
        (
            "exists with other parameters",
            |r| {
                r.parameters = pairs(&[("kind", "other")]);
            },
            Code::AlreadyExists,
            "kind",
        ),
        (
            "exists with the other access",
            |r| {
                r.volume_capabilities = vec![raw(SNW)];
            },
            Code::AlreadyExists,
            "mount access",
        ),
        (
            "exists elsewhere",
            |r| {
                r.accessibility_requirements = places("there");
            },
            Code::AlreadyExists,
            "accessible",
        ),
    ];
    check_rows(&bench, "taken", &rows).await;
    assert_eq!(bench.fake.state().volumes.len(), 1);
}

#[tokio::test]
async fn create_volume_again_is_the_same_volume() {
    let bench = Bench::new();
    let mut request = create(&"n".repeat(128));
    request.parameters = pairs(&[("kind", "fast"), ("csi.storage.k8s.io/pvc/name", "claim")]);
    request.accessibility_requirements = places("here");
    let first = ok(bench.driver.create_volume(of(request.clone())).await).volume.unwrap();
    request.parameters.insert("csi.storage.k8s.io/pvc/name".into(), "renamed".into());
    request.capacity_range = range(GIB / 2, 2 * GIB);
    let second = ok(bench.driver.create_volume(of(request)).await).volume.unwrap();
    assert_eq!(first, second);
    assert_eq!(first.capacity_bytes, GIB);
    assert_eq!(first.accessible_topology[0].segments["topology.test/node"], "here");
    assert_eq!(bench.fake.state().volumes.len(), 1);
}

#[tokio::test]
async fn create_volume_from_a_source_says_so_and_is_as_large() {
    let bench = Bench::new();
    let mut large = create("large");
    large.capacity_range = range(3 * GIB, 0);
    let source = bench.volume(large).await;
    let snapshot = bench.snapshot("s", &source).await;
    for (name, content) in [("clone", from_volume(&source)), ("restored", from_snapshot(&snapshot))] {
        let mut request = create(name);
        request.volume_content_source = content.clone();
        let made = ok(bench.driver.create_volume(of(request)).await).volume.unwrap();
        assert_eq!((made.content_source, made.capacity_bytes), (content, 3 * GIB), "{name}");
    }
}

#[tokio::test]
async fn a_source_that_the_driver_does_not_have_is_refused() {
    let bench = Bench::composed(|fake| {
        Driver::new(NAME, "1")
            .controller(controller_part(fake))
            .node(node_part(fake).staging(fake).mount_group())
    });
    let volume = bench.volume(create("source")).await;
    let mut request = create("clone");
    request.volume_content_source = from_volume(&volume);
    refused("no cloning", bench.driver.create_volume(of(request)).await, Code::InvalidArgument);
    // Without a placement, topology is neither asked for nor answered.
    let mut request = create("anywhere");
    request.accessibility_requirements = places("there");
    let made = ok(bench.driver.create_volume(of(request)).await).volume.unwrap();
    assert!(made.accessible_topology.is_empty());
}

#[tokio::test]
async fn delete_volume_answers_the_rows_of_its_error_table() {
    let bench = Bench::new();
    refused("no id", bench.driver.delete_volume(of(delete(""))).await, Code::InvalidArgument);
    ok(bench.driver.delete_volume(of(delete("unknown"))).await);

    let id = bench.volume(create("v")).await;
    ok(bench.driver.controller_publish_volume(of(attach(&id, "there"))).await);
    let message =
        refused("attached", bench.driver.delete_volume(of(delete(&id))).await, Code::FailedPrecondition);
    assert!(message.contains("\"there\""), "{message}");
    ok(bench.driver.controller_unpublish_volume(of(detach(&id, ""))).await);

    bench.fake.fail("delete", || Error::Precondition("it has snapshots".into()));
    refused("needed", bench.driver.delete_volume(of(delete(&id))).await, Code::FailedPrecondition);
    bench.fake.fail("delete", || Error::NotFound { what: "volume", id: "v".into() });
    ok(bench.driver.delete_volume(of(delete(&id))).await);
    bench.fake.heal();
    ok(bench.driver.delete_volume(of(delete(&id))).await);
    ok(bench.driver.delete_volume(of(delete(&id))).await);
}

#[tokio::test]
async fn controller_publish_answers_the_rows_of_its_error_table() {
    let bench = Bench::new();
    let id = bench.volume(create("v")).await;
    let publish = |request| bench.driver.controller_publish_volume(of(request));
    refused("no volume id", publish(attach("", "here")).await, Code::InvalidArgument);
    refused("no node id", publish(attach(&id, "")).await, Code::InvalidArgument);
    let nothing = ControllerPublishVolumeRequest { volume_capability: None, ..attach(&id, "here") };
    refused("no capability", publish(nothing).await, Code::InvalidArgument);
    let message = refused("both unknown", publish(attach("no", "nowhere")).await, Code::NotFound);
    assert!(message.contains("volume"), "{message}");
    let message = refused("node unknown", publish(attach(&id, "nowhere")).await, Code::NotFound);
    assert!(message.contains("node \"nowhere\""), "{message}");
    let device = ControllerPublishVolumeRequest { volume_capability: Some(raw(SNW)), ..attach(&id, "here") };
    refused("the other access", publish(device).await, Code::InvalidArgument);

    let context = ok(publish(attach(&id, "here")).await).publish_context;
    assert_eq!(ok(publish(attach(&id, "here")).await).publish_context, context);
    let reader = ControllerPublishVolumeRequest { readonly: true, ..attach(&id, "here") };
    refused("published, incompatible", publish(reader).await, Code::AlreadyExists);
    let message = refused("on another node", publish(attach(&id, "there")).await, Code::FailedPrecondition);
    assert!(message.contains("\"here\""), "{message}");
}

#[tokio::test]
async fn a_full_node_takes_no_volume_but_those_it_has() {
    let bench = Bench::with(|fake| fake.max_volumes = Some(3), |_| {});
    let mut ids = Vec::new();
    for number in 0..8 {
        ids.push(bench.volume(create(&number.to_string())).await);
    }
    let mut calls = tokio::task::JoinSet::new();
    for id in ids.clone() {
        let driver = bench.driver.clone();
        calls.spawn(
            async move { driver.controller_publish_volume(of(attach(&id, "here"))).await.map(|_| id) },
        );
    }
    let (attached, full): (Vec<_>, Vec<_>) = calls.join_all().await.into_iter().partition(Result::is_ok);
    assert_eq!(attached.len(), 3);
    assert!(full.iter().all(|reply| reply.as_ref().unwrap_err().code() == Code::ResourceExhausted));
    let known = attached[0].as_ref().unwrap();
    ok(bench.driver.controller_publish_volume(of(attach(known, "here"))).await);
}

#[tokio::test]
async fn controller_unpublish_of_what_is_not_there_is_done() {
    let bench = Bench::new();
    let id = bench.volume(create("v")).await;
    let unpublish = |request| bench.driver.controller_unpublish_volume(of(request));
    refused("no id", unpublish(detach("", "here")).await, Code::InvalidArgument);
    ok(unpublish(detach("unknown", "here")).await);
    ok(unpublish(detach(&id, "nowhere")).await);
    ok(bench.driver.controller_publish_volume(of(attach(&id, "here"))).await);
    ok(unpublish(detach(&id, "there")).await);
    assert_eq!(bench.fake.state().volumes[&id.parse().unwrap()].1.attachments.len(), 1);
    ok(unpublish(detach(&id, "")).await);
    assert!(bench.fake.state().volumes[&id.parse().unwrap()].1.attachments.is_empty());
}

#[tokio::test]
async fn validate_confirms_only_what_is_so() {
    let bench = Bench::new();
    let mut request = create("v");
    request.parameters = pairs(&[("kind", "fast")]);
    request.mutable_parameters = pairs(&[(MUTABLE, "9")]);
    let id = bench.volume(request).await;
    let right = ValidateVolumeCapabilitiesRequest {
        volume_id: id,
        volume_capabilities: vec![mounted(SNW), mounted(AccessModeNumber::MultiNodeReaderOnly)],
        volume_context: pairs(&[("made", "here")]),
        parameters: pairs(&[("kind", "fast"), ("csi.storage.k8s.io/pv/name", "x")]),
        mutable_parameters: pairs(&[(MUTABLE, "9")]),
        ..Default::default()
    };
    let validate = |request| bench.driver.validate_volume_capabilities(of(request));
    let confirmed = ok(validate(right.clone()).await).confirmed.unwrap();
    assert_eq!(confirmed.volume_capabilities, right.volume_capabilities);
    assert_eq!(confirmed.parameters, right.parameters);

    let wrong: [(Change<ValidateVolumeCapabilitiesRequest>, &str); 5] = [
        (|r| r.volume_capabilities = vec![raw(SNW)], "mount access"),
        (|r| r.volume_context = pairs(&[("made", "there")]), "volume_context"),
        (|r| r.parameters = pairs(&[("kind", "slow")]), "parameters"),
        (|r| r.mutable_parameters = pairs(&[(MUTABLE, "8")]), "mutable_parameters"),
        (|r| r.parameters = pairs(&[("other", "1")]), "parameters"),
    ];
    for (change, word) in wrong {
        let mut request = right.clone();
        change(&mut request);
        let response = ok(validate(request).await);
        assert!(response.confirmed.is_none() && response.message.contains(word), "{word}: {response:?}");
    }
    refused("no id", validate(ValidateVolumeCapabilitiesRequest::default()).await, Code::InvalidArgument);
    let none = ValidateVolumeCapabilitiesRequest { volume_capabilities: vec![], ..right.clone() };
    refused("no capabilities", validate(none).await, Code::InvalidArgument);
    let unknown = ValidateVolumeCapabilitiesRequest { volume_id: "no".into(), ..right };
    refused("unknown", validate(unknown).await, Code::NotFound);
}

#[tokio::test]
async fn volumes_are_listed_in_pages_or_all_at_once() {
    let bench = Bench::new();
    for number in 0..10 {
        bench.volume(create(&number.to_string())).await;
    }
    let list = |max_entries, token: String| {
        bench.driver.list_volumes(of(ListVolumesRequest { max_entries, starting_token: token }))
    };
    let all = ok(list(0, String::new()).await);
    assert_eq!((all.entries.len(), all.next_token.as_str()), (10, ""));
    assert_eq!(bench.fake.state().longest_page, 3, "the backend is asked for pages");

    let (mut seen, mut token) = (Vec::new(), String::new());
    loop {
        let page = ok(list(4, token).await);
        assert!(page.entries.len() <= 4);
        seen.extend(page.entries);
        token = page.next_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(seen, all.entries);
    refused("a token never given", list(0, "invalid-token".into()).await, Code::Aborted);
    refused("a negative number", list(-1, String::new()).await, Code::InvalidArgument);
    refused("a token of 1 MB", list(0, "x".repeat(1 << 20)).await, Code::InvalidArgument);
}

#[tokio::test]
async fn a_volume_is_got_with_its_nodes() {
    let bench = Bench::new();
    let id = bench.volume(create("v")).await;
    ok(bench.driver.controller_publish_volume(of(attach(&id, "there"))).await);
    let get = |id: &str| {
        bench.driver.controller_get_volume(of(ControllerGetVolumeRequest { volume_id: id.into() }))
    };
    let found = ok(get(&id).await);
    assert_eq!(found.status.unwrap().published_node_ids, ["there"]);
    assert_eq!(found.volume.unwrap().volume_id, id);
    refused("unknown", get("no").await, Code::NotFound);
    refused("no id", get("").await, Code::InvalidArgument);
}

#[tokio::test]
async fn health_is_asked_of_the_backend_and_answered_once_per_reason() {
    let bench = Bench::new();
    let get = |id: &str| {
        let request = ControllerGetVolumeHealthRequest { volume_id: id.into(), ..Default::default() };
        bench.driver.controller_get_volume_health(of(request))
    };
    refused("no id", get("").await, Code::InvalidArgument);
    refused("unknown", get("no").await, Code::NotFound);
    let health = ok(get("damaged").await).volume_health.unwrap();
    assert_eq!(health.health_statuses.len(), 1);
    let id = bench.volume(create("v")).await;
    let health = ok(get(&id).await).volume_health.unwrap();
    assert_eq!((health.volume_id.as_str(), health.health_statuses.len()), (id.as_str(), 0));
    let request = ControllerListVolumeHealthRequest { max_entries: 1, ..Default::default() };
    assert_eq!(ok(bench.driver.controller_list_volume_health(of(request)).await).entries.len(), 1);
}

#[tokio::test]
async fn capacity_is_there_here_and_not_elsewhere() {
    let bench = Bench::new();
    let ask = |node: Option<&str>, parameters| {
        let accessible_topology =
            node.map(|node| Topology { segments: pairs(&[("topology.test/node", node)]) });
        let request = GetCapacityRequest { accessible_topology, parameters, ..Default::default() };
        bench.driver.get_capacity(of(request))
    };
    let here = ok(ask(Some("here"), pairs(&[])).await);
    assert_eq!((here.available_capacity, here.maximum_volume_size), (9 * GIB, Some(5 * GIB)));
    assert_eq!(ok(ask(None, pairs(&[])).await).minimum_volume_size, Some(GIB));
    assert_eq!(ok(ask(Some("there"), pairs(&[])).await).available_capacity, 0);
    refused("a parameter unknown", ask(None, pairs(&[("x", "y")])).await, Code::InvalidArgument);
}

#[tokio::test]
async fn controller_expand_answers_the_rows_of_its_error_table() {
    let bench = Bench::new();
    let id = bench.volume(create("v")).await;
    let expand = |id: &str, capacity_range| {
        let request =
            ControllerExpandVolumeRequest { volume_id: id.into(), capacity_range, ..Default::default() };
        bench.driver.controller_expand_volume(of(request))
    };
    refused("no id", expand("", range(GIB, 0)).await, Code::InvalidArgument);
    refused("no range", expand(&id, None).await, Code::InvalidArgument);
    refused("an empty range", expand(&id, range(0, 0)).await, Code::InvalidArgument);
    refused("a negative size", expand(&id, range(-1, 0)).await, Code::InvalidArgument);
    refused("unknown", expand("no", range(GIB, 0)).await, Code::NotFound);
    refused("too large", expand(&id, range(200 * GIB, 0)).await, Code::OutOfRange);
    refused("smaller by the limit", expand(&id, range(0, GIB / 2)).await, Code::OutOfRange);
    let device = ControllerExpandVolumeRequest {
        volume_id: id.clone(),
        capacity_range: range(2 * GIB, 0),
        volume_capability: Some(raw(SNW)),
        ..Default::default()
    };
    refused(
        "the other access",
        bench.driver.controller_expand_volume(of(device)).await,
        Code::InvalidArgument,
    );
    for required in [2 * GIB, 2 * GIB, GIB] {
        let grown = ok(expand(&id, range(required, 0)).await);
        assert_eq!((grown.capacity_bytes, grown.node_expansion_required), (2 * GIB, true));
    }
}

#[tokio::test]
async fn controller_modify_answers_the_rows_of_its_error_table() {
    let bench = Bench::new();
    let id = bench.volume(create("v")).await;
    let modify = |id: &str, mutable: &[(&str, &str)]| {
        let mutable_parameters = pairs(mutable);
        let request =
            ControllerModifyVolumeRequest { volume_id: id.into(), mutable_parameters, ..Default::default() };
        bench.driver.controller_modify_volume(of(request))
    };
    refused("no id", modify("", &[]).await, Code::InvalidArgument);
    refused("unknown", modify("no", &[("x", "y")]).await, Code::NotFound);
    bench.fake.fail("modify", || panic!("nothing may be applied"));
    refused("not supported", modify(&id, &[(MUTABLE, "1"), ("x", "y")]).await, Code::InvalidArgument);
    bench.fake.heal();
    ok(modify(&id, &[(MUTABLE, "1")]).await);
    ok(modify(&id, &[(MUTABLE, "1")]).await);
}

#[tokio::test]
async fn what_is_being_worked_on_is_aborted_by_name() {
    let bench = Bench::new();
    let id = bench.volume(create("v")).await;
    let key = Key::Volume(id.parse().unwrap());

    let held = bench.driver.lock([(Key::VolumeName("v".parse().unwrap()), Hold::Exclusive)]).unwrap();
    let message = refused("create", bench.driver.create_volume(of(create("v"))).await, Code::Aborted);
    assert!(message.contains("\"v\""), "{message}");
    drop(held);

    let held = bench.driver.lock([(key.clone(), Hold::Exclusive)]).unwrap();
    refused("create, being deleted", bench.driver.create_volume(of(create("v"))).await, Code::Aborted);
    refused("delete", bench.driver.delete_volume(of(delete(&id))).await, Code::Aborted);
    refused("attach", bench.driver.controller_publish_volume(of(attach(&id, "here"))).await, Code::Aborted);
    refused("detach", bench.driver.controller_unpublish_volume(of(detach(&id, ""))).await, Code::Aborted);
    drop(held);

    // Two clones of one source are made at the same time, while it cannot be deleted.
    let _reader = bench.driver.lock([(key, Hold::Shared)]).unwrap();
    let mut clone = create("clone");
    clone.volume_content_source = from_volume(&id);
    bench.volume(clone).await;
    refused("delete a source", bench.driver.delete_volume(of(delete(&id))).await, Code::Aborted);
}

#[tokio::test]
async fn a_failure_of_the_backend_reaches_the_caller_and_frees_the_volume() {
    let bench = Bench::new();
    let full = || berth_host::Error::new("make the image", rustix::io::Errno::NOSPC).into();
    bench.fake.fail("create", full);
    refused("full", bench.driver.create_volume(of(create("v"))).await, Code::ResourceExhausted);
    bench.fake.fail("create", || Error::State("lost".into()));
    refused("state", bench.driver.create_volume(of(create("v"))).await, Code::Internal);
    bench.fake.fail("find", || Error::Busy("later".into()));
    refused("busy", bench.driver.create_volume(of(create("v"))).await, Code::Aborted);
    bench.fake.heal();
    bench.volume(create("v")).await;
}
