//! Identity, life cycles, repeated calls, staging, lists, and what only some drivers have.

use super::*;

pub(super) fn identity() -> Vec<Switch> {
    let unknown_method: Run = Box::new(|reference, path, method, message| {
        Box::pin(async move {
            if method == "NoSuchMethod" {
                return Ok(Bytes::new());
            }
            reference.inner(&path, message).await
        })
    });
    vec![
        alter("identity.name", |_, _: &GetPluginInfoRequest, answer| {
            "-reference-".clone_into(&mut answer.name);
        }),
        alter("identity.version", |_, _: &GetPluginInfoRequest, answer| answer.vendor_version.clear()),
        alter("identity.stable", |reference, _: &GetPluginCapabilitiesRequest, answer| {
            if reference.count("GetPluginCapabilities").is_multiple_of(2) {
                answer.capabilities.reverse();
            }
        }),
        alter("identity.known", |_, _: &ControllerGetCapabilitiesRequest, answer| {
            let first = answer.capabilities[0];
            answer.capabilities.push(first);
        }),
        refuse("identity.announced", Code::Unimplemented, |_, r: &ControllerListVolumeHealthRequest| {
            r.max_entries == 1
        }),
        Switch { check: "identity.unknown-method", run: unknown_method },
        alter("identity.node-info", |reference, _: &NodeGetInfoRequest, answer| {
            if reference.count("NodeGetInfo") == 2 {
                "another".clone_into(&mut answer.node_id);
            }
        }),
    ]
}

pub(super) fn behaviour() -> Vec<Switch> {
    vec![
        internal("lifecycle.create-any-size", |r: &CreateVolumeRequest| {
            has_all(r) && r.capacity_range.is_none()
        }),
        alter("lifecycle.validate", |_, _: &ValidateVolumeCapabilitiesRequest, answer| {
            answer.confirmed = None;
        }),
        refuse(
            "lifecycle.detach-everywhere",
            Code::InvalidArgument,
            |_, r: &ControllerUnpublishVolumeRequest| r.node_id.is_empty() && is_volume(&r.volume_id),
        ),
        internal("lifecycle.stats", |r: &NodeGetVolumeStatsRequest| {
            is_volume(&r.volume_id) && r.volume_path.contains("/target-")
        }),
        internal("lifecycle.clone", |r: &CreateVolumeRequest| {
            source_volume(r).is_some_and(|id| id != MISSING)
        }),
        internal("lifecycle.node-expand", |r: &NodeExpandVolumeRequest| {
            is_volume(&r.volume_id) && !r.volume_path.is_empty()
        }),
        alter("lifecycle.capacity", |_, _: &GetCapacityRequest, answer| answer.available_capacity = -1),
        alter("lifecycle.get-volume", |_, _: &ControllerGetVolumeRequest, answer| {
            answer.volume.as_mut().unwrap().volume_id.push('x');
        }),
        alter("lifecycle.get-snapshot", |_, _: &GetSnapshotRequest, answer| {
            answer.snapshot.as_mut().unwrap().snapshot_id.push('x');
        }),
        internal("limits.long-name", |r: &CreateVolumeRequest| r.name.len() == 128),
        rewrite("limits.long-names-differ", |r: &mut CreateVolumeRequest| {
            if r.name.len() == 128 {
                r.name.pop();
            }
        }),
        refuse("limits.any-letters", Code::InvalidArgument, |_, r: &CreateVolumeRequest| !r.name.is_ascii()),
        internal("limits.long-snapshot-name", |r: &CreateSnapshotRequest| r.name.len() == 128),
        alter("repeat.attach", |reference, _: &ControllerPublishVolumeRequest, answer| {
            let count = reference.count("ControllerPublishVolume");
            answer.publish_context.insert("attached".to_owned(), count.to_string());
        }),
        alter("repeat.snapshot", |reference, _: &CreateSnapshotRequest, answer| {
            let time = answer.snapshot.as_mut().unwrap().creation_time.as_mut().unwrap();
            time.seconds -= i64::from(reference.count("CreateSnapshot"));
        }),
        alter("repeat.expand", |reference, _: &ControllerExpandVolumeRequest, answer| {
            answer.capacity_bytes += i64::from(reference.count("ControllerExpandVolume"));
        }),
        recode("staging.publish-first", Code::FailedPrecondition, |r: &NodePublishVolumeRequest| {
            is_volume(&r.volume_id)
                && !r.staging_target_path.is_empty()
                && mode(r.volume_capability.as_ref()) != Some(Mode::SingleNodeSingleWriter)
        }),
        watch("staging.both-ways", |reference, method, message, answer| {
            match method {
                "NodeUnstageVolume" => {
                    reference.note(format!(
                        "unstaged {}",
                        NodeUnstageVolumeRequest::decode(message).unwrap().volume_id
                    ));
                }
                "NodeStageVolume" => {
                    let id = NodeStageVolumeRequest::decode(message).unwrap().volume_id;
                    if reference.knows(&format!("unstaged {id}")) {
                        return Err(Status::internal("the switch stages once"));
                    }
                }
                _ => {}
            }
            answer
        }),
        recode("staging.single-writer", Code::FailedPrecondition, |r: &NodePublishVolumeRequest| {
            mode(r.volume_capability.as_ref()) == Some(Mode::SingleNodeSingleWriter)
        }),
        refuse("staging.multi-writer", Code::FailedPrecondition, |_, r: &NodePublishVolumeRequest| {
            r.target_path.ends_with("-second")
                && mode(r.volume_capability.as_ref()) == Some(Mode::SingleNodeMultiWriter)
        }),
        crowd("concurrent.create-different", &["CreateVolume"], |under_way, about| {
            under_way.iter().filter(|(_, other)| other != about).count() >= 4
        }),
        crowd("concurrent.create-same", &["CreateVolume"], |under_way, about| {
            under_way.iter().filter(|(_, other)| other == about).count() >= 6
        }),
        crowd("concurrent.delete-same", &["DeleteVolume"], |under_way, about| {
            under_way.iter().filter(|(_, other)| other == about).count() >= 6
        }),
        crowd("concurrent.publish-same", &["NodePublishVolume"], |under_way, about| {
            under_way.iter().filter(|(_, other)| other == about).count() >= 6
        }),
        crowd("concurrent.publish-different", &["NodePublishVolume"], |under_way, about| {
            under_way.iter().filter(|(_, other)| other != about).count() >= 2
        }),
        crowd("concurrent.mixed", &["NodePublishVolume", "NodeUnpublishVolume"], |under_way, about| {
            let of = |method: &str| under_way.iter().any(|(other, path)| other == method && path == about);
            of("NodePublishVolume") && of("NodeUnpublishVolume")
        }),
    ]
}

pub(super) fn lists() -> Vec<Switch> {
    vec![
        watch("list.new", |reference, method, message, answer| match (method, answer) {
            ("CreateVolume", Ok(made)) => {
                let id = CreateVolumeResponse::decode(made.clone()).unwrap().volume.unwrap().volume_id;
                reference.note(format!("created {id}"));
                Ok(made)
            }
            ("ListVolumes", Ok(list)) if ListVolumesRequest::decode(message).unwrap().max_entries == 0 => {
                let mut list = ListVolumesResponse::decode(list).unwrap();
                list.entries.retain(|entry| {
                    let id = &entry.volume.as_ref().unwrap().volume_id;
                    let is_attached =
                        entry.status.as_ref().is_some_and(|status| !status.published_node_ids.is_empty());
                    is_attached || !reference.knows(&format!("created {id}"))
                });
                Ok(encoded(&list))
            }
            (_, answer) => answer,
        }),
        watch("list.deleted", |reference, method, message, answer| match (method, answer) {
            ("DeleteVolume", Ok(done)) => {
                let id = DeleteVolumeRequest::decode(message).unwrap().volume_id;
                reference.note(format!("deleted {id}"));
                Ok(done)
            }
            ("ListVolumes", Ok(list)) if ListVolumesRequest::decode(message).unwrap().max_entries == 0 => {
                let mut list = ListVolumesResponse::decode(list).unwrap();
                let memory = reference.memory.lock();
                for id in memory.facts.iter().filter_map(|fact| fact.strip_prefix("deleted ")) {
                    let volume = Some(Volume { volume_id: id.to_owned(), ..Default::default() });
                    if !list.entries.iter().any(|entry| entry.volume.as_ref().unwrap().volume_id == id) {
                        list.entries.push(list_volumes_response::Entry { volume, status: None });
                    }
                }
                Ok(encoded(&list))
            }
            (_, answer) => answer,
        }),
        alter("list.pages", |_, r: &ListVolumesRequest, answer| {
            if r.max_entries == 1 && !r.starting_token.is_empty() {
                answer.entries.clear();
            }
        }),
        refuse("list.pages-change", Code::Aborted, |_, r: &ListVolumesRequest| {
            r.max_entries == 2 && !r.starting_token.is_empty()
        }),
        alter("list.published-nodes", |_, _: &ListVolumesRequest, answer| {
            answer.entries.iter_mut().for_each(|entry| entry.status = None);
        }),
        alter("list.snapshots-new", |_, r: &ListSnapshotsRequest, answer| {
            if r.snapshot_id.is_empty() && r.source_volume_id.is_empty() {
                answer.entries.clear();
            }
        }),
        rewrite("list.snapshots-by-id", |r: &mut ListSnapshotsRequest| {
            if r.snapshot_id != MISSING {
                r.snapshot_id.clear();
            }
        }),
        rewrite("list.snapshots-by-source", |r: &mut ListSnapshotsRequest| {
            if r.source_volume_id != MISSING && r.max_entries == 0 {
                r.source_volume_id.clear();
            }
        }),
        refuse("list.snapshots-missing", Code::NotFound, |_, r: &ListSnapshotsRequest| {
            r.snapshot_id == MISSING
        }),
        refuse("list.snapshots-of-missing", Code::NotFound, |_, r: &ListSnapshotsRequest| {
            r.source_volume_id == MISSING
        }),
        alter("list.snapshots-pages", |_, r: &ListSnapshotsRequest, answer| {
            if r.max_entries == 2 && !r.starting_token.is_empty() {
                answer.entries.clear();
            }
        }),
    ]
}

pub(super) fn extras() -> Vec<Switch> {
    vec![
        alter("group.create", |_, _: &CreateVolumeGroupSnapshotRequest, answer| {
            let group = answer.group_snapshot.as_mut().unwrap();
            group.snapshots.iter_mut().for_each(|snapshot| snapshot.group_snapshot_id.clear());
        }),
        alter("group.get", |_, _: &GetVolumeGroupSnapshotRequest, answer| {
            answer.group_snapshot.as_mut().unwrap().group_snapshot_id.push('x');
        }),
        recode("group.other-sources", Code::AlreadyExists, |_: &CreateVolumeGroupSnapshotRequest| true),
        recode("group.member", Code::InvalidArgument, |r: &DeleteSnapshotRequest| is_volume(&r.snapshot_id)),
        watch("group.restore", |reference, method, message, answer| {
            if let ("CreateVolumeGroupSnapshot", Ok(made)) = (method, &answer) {
                let group =
                    CreateVolumeGroupSnapshotResponse::decode(made.clone()).unwrap().group_snapshot.unwrap();
                group.snapshots.iter().for_each(|member| {
                    reference.note(format!("member {}", member.snapshot_id));
                });
            }
            if method == "CreateVolume"
                && let Some(snapshot) = source_snapshot(&CreateVolumeRequest::decode(message).unwrap())
                && reference.knows(&format!("member {snapshot}"))
            {
                return Err(Status::internal("the switch does not restore members"));
            }
            answer
        }),
        alter("health.controller", |_, _: &ControllerGetVolumeHealthRequest, answer| {
            answer.volume_health.as_mut().unwrap().volume_id.push('x');
        }),
        internal("health.list", |r: &ControllerListVolumeHealthRequest| r.max_entries == 0),
        internal("health.node", |r: &NodeGetVolumeHealthRequest| is_volume(&r.volume_id)),
        internal("health.storage", |_: &NodeGetStorageHealthRequest| true),
        internal("modify.change", |r: &ControllerModifyVolumeRequest| {
            is_volume(&r.volume_id) && r.mutable_parameters.contains_key("noatime")
        }),
        internal("modify.create", |r: &CreateVolumeRequest| r.mutable_parameters.contains_key("noatime")),
        internal("modify.create-unknown", |r: &CreateVolumeRequest| {
            r.mutable_parameters.contains_key("berth-certify-unknown")
        }),
        alter("topology.node", |reference, _: &NodeGetInfoRequest, answer| {
            if reference.count("NodeGetInfo") > 1 {
                answer.accessible_topology = None;
            }
        }),
        alter("topology.create", |_, _: &CreateVolumeRequest, answer| {
            for topology in &mut answer.volume.as_mut().unwrap().accessible_topology {
                topology.segments.values_mut().for_each(|value| value.push('x'));
            }
        }),
        alter("topology.snapshot", |_, _: &CreateSnapshotRequest, answer| {
            if let Some(snapshot) = &mut answer.snapshot {
                let segments = [("berth.dev/elsewhere".to_owned(), "x".to_owned())].into();
                snapshot.accessible_topology = vec![Topology { segments }];
            }
        }),
        recode("topology.impossible", Code::ResourceExhausted, |r: &CreateVolumeRequest| {
            required(r.capacity_range.as_ref()) < i64::MAX
        }),
    ]
}
