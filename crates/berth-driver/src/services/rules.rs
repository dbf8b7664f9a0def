//! Rules of the spec that are about values, not about any one call.

use std::{collections::BTreeMap, path::Path};

use berth_core::{
    Access, AccessKind, AccessMode, Capacity, CapacityRange, VolumeCapability,
    names::{KUBERNETES_PARAMETER_PREFIX, PROVISIONER_IDENTITY},
};

use crate::{Attached, Error, Parameters, Result, Supports, Volume, call::volumes::CreateVolume};

/// Refuses what volumes of this driver cannot be used as.
pub(super) fn check_supported(supports: Supports, capability: &VolumeCapability) -> Result<()> {
    let (kind, mode) = (capability.access.kind(), capability.mode);
    if kind == AccessKind::Block && !supports.block {
        return Err(Error::Invalid(format!("{kind} access is not supported by this driver")));
    }
    if !mode.is_single_node() && !supports.many_nodes {
        return Err(Error::Invalid(format!("access mode {mode:?} is not supported by this driver")));
    }
    Ok(())
}

/// Refuses a group to own the files where that was not announced.
pub(super) fn check_group(capability: &VolumeCapability, mount_group: bool) -> Result<()> {
    // Whoever gives files away opens them, on a server that may not answer.
    if matches!(capability.access, Access::Mount { group: Some(_), .. }) && !mount_group {
        return Err(Error::Invalid("volume_mount_group is not supported by this driver".to_owned()));
    }
    Ok(())
}

/// Refuses to use a raw volume as a filesystem, and the other way round.
pub(super) fn check_kind(volume: &Volume, wanted: AccessKind) -> Result<()> {
    match volume.access {
        Some(access) if access != wanted => {
            Err(Error::Invalid(format!("volume {:?} is for {access} access, not for {wanted}", volume.id)))
        }
        _ => Ok(()),
    }
}

/// In what an existing volume of the same name is not the one asked for, if in anything.
pub(super) fn difference(volume: &Volume, call: &CreateVolume) -> Option<String> {
    let CreateVolume { new, source, topology } = call;
    if !new.range.contains(volume.capacity) {
        return Some(format!("its size is {} ({} bytes)", volume.capacity, volume.capacity.bytes()));
    }
    if volume.source != *source {
        return Some("it has another content source".to_owned());
    }
    if let Some(access) = volume.access.filter(|access| *access != new.access()) {
        return Some(format!("it is for {access} access"));
    }
    if let Some(key) = different_key(&volume.parameters, &new.parameters) {
        return Some(format!("its parameter {key:?} has another value"));
    }
    if !topology.as_ref().is_none_or(|wanted| wanted.accepts(volume.topology.as_deref())) {
        return Some("it is not accessible from where it is asked for".to_owned());
    }
    None
}

/// The first parameter that two maps disagree about, leaving aside those that Kubernetes adds by itself.
fn different_key<'a>(one: &'a Parameters, other: &'a Parameters) -> Option<&'a str> {
    let ours =
        |map: &'a Parameters| map.iter().filter(|(key, _)| !key.starts_with(KUBERNETES_PARAMETER_PREFIX));
    let missing_in = |from, to: &'a Parameters| ours(from).find(|(key, value)| to.get(*key) != Some(*value));
    missing_in(one, other).or_else(|| missing_in(other, one)).map(|(key, _)| key.as_str())
}

/// The first pair of `given` that is not so, leaving aside those that Kubernetes adds by itself.
pub(super) fn disagreement(
    given: &BTreeMap<String, String>,
    agrees: impl Fn((&str, &str)) -> bool,
) -> Option<&str> {
    let is_added = |key: &str| key.starts_with(KUBERNETES_PARAMETER_PREFIX) || key == PROVISIONER_IDENTITY;
    given
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .find(|pair| !is_added(pair.0) && !agrees(*pair))
        .map(|(key, _)| key)
}

/// Refuses sizes that cannot hold what the source holds.
pub(super) fn check_source_size(range: &CapacityRange, source: Capacity) -> Result<()> {
    match range.limit() {
        Some(limit) if limit < source => Err(Error::OutOfRange(format!(
            "limit_bytes ({}) is smaller than the source ({} bytes)",
            limit.bytes(),
            source.bytes()
        ))),
        _ => Ok(()),
    }
}

/// Refuses to attach a volume where its other attachments do not allow it.
pub(super) fn check_attach(existing: &[Attached], wanted: &Attached) -> Result<()> {
    if let Some(here) = existing.iter().find(|attached| attached.node == wanted.node) {
        let same_mode = here.mode.is_none() || here.mode == wanted.mode;
        return if same_mode && here.read_only == wanted.read_only {
            Ok(())
        } else {
            Err(Error::Conflict(format!(
                "the volume is already on node {:?} with read-only {} and mode {:?}",
                here.node, here.read_only, here.mode
            )))
        };
    }
    let is_single_node = |attached: &Attached| attached.mode.is_some_and(AccessMode::is_single_node);
    let in_the_way = existing.iter().find(|other| {
        let one_node = is_single_node(wanted) || is_single_node(other);
        let one_writer =
            wanted.mode == Some(AccessMode::MultiNodeSingleWriter) && !wanted.read_only && !other.read_only;
        one_node || one_writer
    });
    match in_the_way {
        Some(other) => {
            Err(Error::Precondition(format!("the volume is on node {:?}; detach it there first", other.node)))
        }
        None => Ok(()),
    }
}

/// A volume mounted among the driver's own files would be taken for one of them.
pub(super) fn check_outside(private: &Path, field: &str, path: &Path) -> Result<()> {
    if path.starts_with(private) {
        return Err(Error::Invalid(format!(
            "{field} {} lies in {}, which is the driver's own",
            path.display(),
            private.display()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use berth_core::Topology;
    use berth_csi::v1;

    use super::*;
    use crate::{ContentSource, NewVolume, TopologyRequirement};

    /// How a row of a table differs from a call that is right.
    type Change = fn(&mut CreateVolume);

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    fn volume() -> Volume {
        Volume {
            id: "v".parse().unwrap(),
            capacity: Capacity::gibibytes(2),
            access: Some(AccessKind::Mount),
            parameters: Arc::new(map(&[("kind", "fast"), ("csi.storage.k8s.io/pvc/name", "old")])),
            mutable: Arc::default(),
            context: BTreeMap::new(),
            source: None,
            topology: Some(Arc::new(Topology::single("node", "1"))),
            attachments: Vec::new(),
            ephemeral: false,
        }
    }

    fn call(change: impl FnOnce(&mut CreateVolume)) -> CreateVolume {
        let access = Access::Mount { fs_type: String::new(), flags: vec![], group: None };
        let mut call = CreateVolume {
            new: NewVolume {
                name: "n".parse().unwrap(),
                range: CapacityRange::new(1 << 30, 0).unwrap(),
                capabilities: vec![VolumeCapability { access, mode: AccessMode::SingleNodeWriter }],
                parameters: map(&[("kind", "fast")]),
                mutable: BTreeMap::new(),
                ephemeral: false,
            },
            source: None,
            topology: None,
        };
        change(&mut call);
        call
    }

    fn at(node: &str) -> Option<TopologyRequirement> {
        let requirement = v1::TopologyRequirement {
            requisite: vec![v1::Topology { segments: map(&[("node", node)]) }],
            preferred: vec![],
        };
        let request = v1::CreateSnapshotRequest {
            name: "n".into(),
            source_volume_id: "v".into(),
            accessibility_requirements: Some(requirement),
            ..Default::default()
        };
        crate::call::snapshots::CreateSnapshot::try_from(request).unwrap().topology
    }

    #[test]
    fn a_volume_of_the_same_name_is_the_same_or_it_is_said_what_differs() {
        assert_eq!(difference(&volume(), &call(|_| {})), None);
        assert_eq!(difference(&volume(), &call(|call| call.topology = at("1"))), None);
        assert_eq!(difference(&volume(), &call(|call| call.new.mutable = map(&[("iops", "9")]))), None);
        let kubernetes = map(&[("kind", "fast"), ("csi.storage.k8s.io/pvc/name", "new")]);
        assert_eq!(difference(&volume(), &call(|call| call.new.parameters = kubernetes)), None);

        let table: [(Change, &str); 8] = [
            (|call| call.new.range = CapacityRange::new(3 << 30, 0).unwrap(), "size"),
            (|call| call.new.range = CapacityRange::new(0, 1 << 30).unwrap(), "size"),
            (|call| call.source = Some(ContentSource::Volume("w".parse().unwrap())), "source"),
            (|call| call.new.capabilities[0].access = Access::Block, "mount access"),
            (|call| call.new.parameters = map(&[("kind", "slow")]), "\"kind\""),
            (|call| call.new.parameters = BTreeMap::new(), "\"kind\""),
            (|call| call.new.parameters = map(&[("kind", "fast"), ("extra", "1")]), "\"extra\""),
            (|call| call.topology = at("2"), "accessible"),
        ];
        for (change, word) in table {
            let said = difference(&volume(), &call(change)).unwrap_or_default();
            assert!(said.contains(word), "{word:?} in {said:?}");
        }
    }

    #[test]
    fn what_is_given_has_to_be_so_and_what_is_not_given_does_not_matter() {
        let known = map(&[("a", "1"), ("b", "2")]);
        let agrees = |(key, value): (&str, &str)| known.get(key).is_some_and(|known| known == value);
        let added = [("csi.storage.k8s.io/x", "y"), (PROVISIONER_IDENTITY, "z")];
        assert_eq!(disagreement(&map(&[&[("a", "1")][..], &added].concat()), agrees), None);
        assert_eq!(disagreement(&map(&[("a", "2")]), agrees), Some("a"));
        assert_eq!(disagreement(&map(&[("c", "")]), agrees), Some("c"));
    }

    #[test]
    fn a_limit_below_the_source_is_out_of_range() {
        let source = Capacity::gibibytes(1);
        for (required, limit, fits) in [
            (0, 0, true),
            (1, 0, true),
            (0, 1 << 30, true),
            (0, (1 << 30) - 1, false),
            (1 << 31, 1 << 31, true),
        ] {
            let range = CapacityRange::new(required, limit).unwrap();
            assert_eq!(check_source_size(&range, source).is_ok(), fits, "{range:?}");
        }
    }

    #[test]
    fn an_unreachable_topology_is_resource_exhausted_and_none_is_everywhere() {
        let here = Topology::single("node", "1");
        assert!(TopologyRequirement::check(None, Some(&here)).is_ok());
        assert!(TopologyRequirement::check(at("1").as_ref(), Some(&here)).is_ok());
        assert!(TopologyRequirement::check(at("2").as_ref(), None).is_ok());
        // A volume that a zone reaches is reached from a node of the zone, and not from one of another.
        let of = |zone: &str| Topology::single("zone", zone);
        let wanted = TopologyRequirement {
            requisite: vec![Topology(map(&[("zone", "a"), ("node", "1")]))],
            preferred: vec![],
        };
        assert!(wanted.accepts(Some(&of("a"))) && !wanted.accepts(Some(&of("b"))));
        assert!(wanted.accepts(Some(&here)) && !wanted.accepts(Some(&Topology::single("rack", "1"))));
        let Err(Error::Exhausted(sentence)) = TopologyRequirement::check(at("2").as_ref(), Some(&here))
        else {
            panic!()
        };
        assert!(sentence.contains("node=2") && sentence.contains("node=1"), "{sentence}");
    }

    #[test]
    fn where_a_volume_is_decides_where_it_may_go() {
        use AccessMode::{
            MultiNodeMultiWriter, MultiNodeReaderOnly, MultiNodeSingleWriter, SingleNodeWriter,
        };
        let on = |node: &str, mode, read_only| Attached {
            node: node.parse().unwrap(),
            read_only,
            mode: Some(mode),
        };
        let one = SingleNodeWriter;
        for (existing, wanted, expected) in [
            (vec![], on("a", one, false), Ok(())),
            (vec![on("a", one, false)], on("a", one, false), Ok(())),
            (vec![on("a", one, false)], on("a", one, true), Err("ALREADY_EXISTS")),
            (vec![on("a", one, false)], on("a", MultiNodeMultiWriter, false), Err("ALREADY_EXISTS")),
            (vec![on("a", one, false)], on("b", one, false), Err("FAILED_PRECONDITION")),
            (vec![on("a", one, false)], on("b", MultiNodeMultiWriter, false), Err("FAILED_PRECONDITION")),
            (vec![on("a", MultiNodeReaderOnly, true)], on("b", MultiNodeReaderOnly, true), Ok(())),
            (vec![on("a", MultiNodeMultiWriter, false)], on("b", MultiNodeMultiWriter, false), Ok(())),
            (vec![on("a", MultiNodeSingleWriter, false)], on("b", MultiNodeSingleWriter, true), Ok(())),
            (
                vec![on("a", MultiNodeSingleWriter, false)],
                on("b", MultiNodeSingleWriter, false),
                Err("FAILED_PRECONDITION"),
            ),
        ] {
            let found = check_attach(&existing, &wanted).map_err(|error| match error {
                Error::Conflict(_) => "ALREADY_EXISTS",
                Error::Precondition(sentence) => {
                    assert!(sentence.contains("\"a\""), "{sentence}");
                    "FAILED_PRECONDITION"
                }
                other => panic!("{other}"),
            });
            assert_eq!(found, expected, "{existing:?} and then {wanted:?}");
        }
    }
}
