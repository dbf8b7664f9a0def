//! What is refused, and in which words.

use berth_core::{Access, AccessKind, AccessMode};
use berth_csi::v1::{
    self,
    volume_capability::{AccessMode as ModeMessage, AccessType, BlockVolume, MountVolume},
    volume_content_source::{SnapshotSource, Type, VolumeSource},
};

use super::{node, snapshots, volumes, *};

/// How a row of a table differs from a capability that is right.
type Change = fn(&mut v1::VolumeCapability);

fn mount(change: impl FnOnce(&mut MountVolume)) -> v1::VolumeCapability {
    let mut mount = MountVolume::default();
    change(&mut mount);
    v1::VolumeCapability {
        access_type: Some(AccessType::Mount(mount)),
        access_mode: Some(ModeMessage { mode: 1 }),
    }
}

fn create() -> v1::CreateVolumeRequest {
    v1::CreateVolumeRequest {
        name: "n".into(),
        volume_capabilities: vec![mount(|_| {})],
        ..Default::default()
    }
}

fn sentence<T, R: TryInto<T, Error = Invalid>>(request: R) -> String {
    match request.try_into() {
        Ok(_) => panic!("it was taken"),
        Err(invalid) => invalid.to_string(),
    }
}

#[test]
fn a_capability_says_everything_or_is_refused() {
    let refused = |capability| {
        sentence::<volumes::CreateVolume, _>(v1::CreateVolumeRequest {
            volume_capabilities: vec![capability],
            ..create()
        })
    };
    let rows: [(Change, &str); 5] = [
        (|c| c.access_type = None, "volume_capabilities.access_type is missing"),
        (|c| c.access_mode = None, "volume_capabilities.access_mode is missing"),
        (
            |c| c.access_mode = Some(ModeMessage { mode: 0 }),
            "volume_capabilities.access_mode.mode is missing",
        ),
        (|c| c.access_mode = Some(ModeMessage { mode: 99 }), "99 is not one this driver knows"),
        (|c| c.access_mode = Some(ModeMessage { mode: -1 }), "-1 is not one this driver knows"),
    ];
    for (change, words) in rows {
        let mut capability = mount(|_| {});
        change(&mut capability);
        let said = refused(capability);
        assert!(said.contains(words), "{words:?} in {said:?}");
    }
    for group in ["users", "-1", "+5", "1.5", "4294967295", "99999999999", " 1"] {
        let said = refused(mount(|m| m.volume_mount_group = group.into()));
        assert!(said.contains("volume_mount_group") && said.contains(group), "{said}");
    }
    assert!(
        refused(mount(|m| m.mount_flags = vec!["x".repeat(2049), "y".repeat(2048)])).contains("mount_flags")
    );
    assert!(refused(mount(|m| m.mount_flags = vec!["a\0b".into()])).contains("NUL"));
    assert!(refused(mount(|m| m.fs_type = "ext4\n".into())).contains("fs_type"));
}

#[test]
fn every_mode_is_known_and_travels_back_as_it_came() {
    for (number, mode) in (1..).zip(AccessMode::ALL) {
        let message = v1::VolumeCapability {
            access_type: Some(AccessType::Block(BlockVolume {})),
            access_mode: Some(ModeMessage { mode: number }),
        };
        let parsed = capability(Some(message.clone())).unwrap();
        assert_eq!((parsed.mode, parsed.access.kind()), (mode, AccessKind::Block));
        assert_eq!(capability::message_of(&parsed), message);
    }
    let message = mount(|m| {
        m.fs_type = "xfs".into();
        m.mount_flags = vec!["noatime".into()];
        m.volume_mount_group = "0".into();
    });
    let parsed = capability(Some(message.clone())).unwrap();
    assert!(matches!(&parsed.access, Access::Mount { group: Some(0), .. }));
    assert_eq!(capability::message_of(&parsed), message);
}

#[test]
fn a_map_larger_than_the_spec_allows_is_refused_by_name() {
    let full = || BTreeMap::from([("k".repeat(1024), "v".repeat(3072))]);
    let over = || BTreeMap::from([("k".repeat(1024), "v".repeat(3073))]);
    let with = |parameters, mutable_parameters| {
        volumes::CreateVolume::try_from(v1::CreateVolumeRequest {
            parameters,
            mutable_parameters,
            ..create()
        })
    };
    assert!(with(full(), full()).is_ok());
    assert!(with(over(), full()).unwrap_err().to_string().starts_with("parameters "));
    assert!(with(full(), over()).unwrap_err().to_string().starts_with("mutable_parameters "));
    let stage = v1::NodeStageVolumeRequest { publish_context: over(), ..Default::default() };
    assert!(sentence::<node::Stage, _>(stage).starts_with("publish_context "));
}

#[test]
fn paths_are_absolute_and_plain() {
    for (text, path) in [("/a", "/a"), ("/a/b/", "/a/b"), ("//a/./b", "/a/b"), ("/ü ", "/ü ")] {
        assert_eq!(absolute_path("p", text), Ok(PathBuf::from(path)), "{text:?}");
    }
    let longest = format!("/{}", "x".repeat(4094));
    assert!(absolute_path("p", &longest).is_ok());
    for (text, words) in [
        ("", "p is missing"),
        ("a/b", "not an absolute path"),
        ("/a/../b", "\"..\""),
        ("/..", "\"..\""),
        ("/", "root directory"),
        ("/a\0", "NUL"),
        (&format!("{longest}x"), "4095"),
    ] {
        let said = absolute_path("p", text).unwrap_err().to_string();
        assert!(said.starts_with("p ") && said.contains(words), "{words:?} in {said:?}");
    }
    assert_eq!(any_path("p", "some/path/"), Ok(PathBuf::from("some/path")));
    assert_eq!(optional_path("p", ""), Ok(None));
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    let said = |required_bytes, limit_bytes| {
        let capacity_range = Some(v1::CapacityRange { required_bytes, limit_bytes });
        sentence::<volumes::CreateVolume, _>(v1::CreateVolumeRequest { capacity_range, ..create() })
    };
    assert_eq!(said(-1, 0), "capacity_range: required_bytes is negative (-1)");
    assert!(said(2, 1).contains("larger than limit_bytes"));
}

#[test]
fn a_source_has_to_name_something() {
    let said = |r#type| {
        let volume_content_source = Some(v1::VolumeContentSource { r#type });
        sentence::<volumes::CreateVolume, _>(v1::CreateVolumeRequest { volume_content_source, ..create() })
    };
    assert!(said(None).contains("volume_content_source.type is missing"));
    assert!(said(Some(Type::Snapshot(SnapshotSource::default()))).contains("snapshot_id is missing"));
    assert!(said(Some(Type::Volume(VolumeSource::default()))).contains("volume_id is missing"));
}

#[test]
fn a_topology_is_any_of_those_named_and_none_is_everywhere() {
    let topology = |value: &str| v1::Topology { segments: BTreeMap::from([("node".into(), value.into())]) };
    let parsed = |requisite, preferred| {
        topology_requirement(Some(v1::TopologyRequirement { requisite, preferred })).unwrap()
    };
    assert_eq!(topology_requirement(None), Ok(None));
    assert_eq!(parsed(vec![], vec![]), None);
    let here = Topology::single("node", "a");
    assert!(parsed(vec![topology("b"), topology("a")], vec![]).unwrap().accepts(Some(&here)));
    assert!(parsed(vec![], vec![topology("a")]).unwrap().accepts(Some(&here)));
    let elsewhere = parsed(vec![topology("b")], vec![topology("c")]).unwrap();
    assert!(!elsewhere.accepts(Some(&here)) && elsewhere.accepts(None));
    assert_eq!(elsewhere.to_string(), "node=b or node=c");
}

#[test]
fn secrets_are_never_shown() {
    let secrets = BTreeMap::from([("password".to_owned(), "hunter2".to_owned())]);
    let call =
        volumes::CreateVolume::try_from(v1::CreateVolumeRequest { secrets: secrets.clone(), ..create() });
    assert!(!format!("{call:?}").contains("hunter2"));
    let request = v1::NodePublishVolumeRequest {
        volume_id: "v".into(),
        target_path: "/t".into(),
        volume_capability: Some(mount(|_| {})),
        secrets,
        ..Default::default()
    };
    assert!(!format!("{:?}", node::Publish::try_from(request).unwrap()).contains("hunter2"));
}

#[test]
fn ranges_per_message_have_a_default_and_an_end() {
    let part = |max_results| {
        let request =
            v1::GetMetadataAllocatedRequest { snapshot_id: "s".into(), max_results, ..Default::default() };
        snapshots::Allocated::try_from(request).map(|call| call.part.ranges_per_message)
    };
    assert_eq!((part(0), part(7), part(i32::MAX)), (Ok(256), Ok(7), Ok(8192)));
    assert!(part(-1).unwrap_err().to_string().contains("max_results is negative"));
}

#[test]
fn inline_volumes_are_those_that_say_so() {
    let publish = |context: &[(&str, &str)]| {
        let request = v1::NodePublishVolumeRequest {
            volume_id: "h".into(),
            target_path: "/t".into(),
            volume_capability: Some(mount(|_| {})),
            volume_context: context.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect(),
            ..Default::default()
        };
        node::Publish::try_from(request).unwrap().inline
    };
    assert_eq!(publish(&[]), None);
    assert_eq!(publish(&[("csi.storage.k8s.io/ephemeral", "false"), ("size", "nonsense")]), None);
    let inline = publish(&[("csi.storage.k8s.io/ephemeral", "true"), ("kind", "fast")]).unwrap();
    assert_eq!((inline.name.as_str(), inline.range.required().unwrap().bytes()), ("ephemeral-h", 1 << 30));
    assert_eq!(inline.parameters, BTreeMap::from([("kind".to_owned(), "fast".to_owned())]));
}
