//! What only some drivers have: groups of snapshots, metadata of snapshots, health, mutable parameters, topology.

use berth_csi::{
    ControllerCapability as Controller, GroupCapability, NodeCapability as Node, PluginService, v1,
};
use tonic::transport::Channel;
use tonic::{Code, Response, Status, Streaming};
use v1::snapshot_metadata_client::SnapshotMetadataClient;

use super::errors::{MISSING, refused};
use super::lifecycle::from_snapshot;
use super::{Need, checks};
use crate::session::{Expected as _, Outcome, Session, broken, describe, ensure, not_run};

const GROUP: Need = Need::Group(GroupCapability::CreateDeleteGetVolumeGroupSnapshot);
const METADATA: Need = Need::Service(PluginService::SnapshotMetadataService);
const SNAPSHOTS: Need = Need::Controller(Controller::CreateDeleteSnapshot);
const MODIFY: Need = Need::Controller(Controller::ModifyVolume);
const TOPOLOGY: Need = Need::Service(PluginService::VolumeAccessibilityConstraints);
const SNAPSHOT_TOPOLOGY: Need = Need::Service(PluginService::SnapshotAccessibilityConstraints);
const CREATE: Need = Need::Controller(Controller::CreateDeleteVolume);

checks! {
    "group.create" Must "CreateVolumeGroupSnapshot": "A group snapshot has a snapshot of every volume, each with the group's id.";
        "Set group_snapshot_id in every member."; [CREATE, GROUP] group_create;
    "group.repeat" Must "CreateVolumeGroupSnapshot": "The same CreateVolumeGroupSnapshot again answers with the same group.";
        "Find the group by its name."; [CREATE, GROUP] group_repeat;
    "group.get" Must "GetVolumeGroupSnapshot": "GetVolumeGroupSnapshot answers with the group and its members.";
        "Answer with what CreateVolumeGroupSnapshot answered."; [CREATE, GROUP] group_get;
    "group.other-sources" Must "CreateVolumeGroupSnapshot": "A name that exists with other volumes is answered with ALREADY_EXISTS.";
        "Record the sources of a group, and compare them."; [CREATE, GROUP] group_other_sources;
    "group.member" Should "DeleteSnapshot": "DeleteSnapshot of a member is refused with INVALID_ARGUMENT, or deletes it.";
        "Members go with their group."; [CREATE, GROUP, SNAPSHOTS] group_member;
    "group.restore" Must "CreateVolume": "A member of a group can be restored.";
        "Members are snapshots like others."; [CREATE, GROUP, SNAPSHOTS] group_restore;
    "metadata.allocated" Must "GetMetadataAllocated": "The blocks of a snapshot come in order, do not overlap, and lie within the volume.";
        "Sort by offset; answer volume_capacity_bytes in every message."; [CREATE, SNAPSHOTS, METADATA, Need::Block] metadata_allocated;
    "metadata.delta" Must "GetMetadataDelta": "The blocks that changed between two snapshots hold what was written.";
        "Compare the two snapshots; when in doubt name a block as changed."; [Need::Volumes, Need::Sight, SNAPSHOTS, METADATA, Need::Block] metadata_delta;
    "metadata.no-id" Must "GetMetadataAllocated": "GetMetadataAllocated without snapshot_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [METADATA] metadata_no_id;
    "metadata.missing" Must "GetMetadataAllocated": "A snapshot that does not exist is answered with NOT_FOUND.";
        "Look the snapshot up."; [METADATA] metadata_missing;
    "metadata.offset" Must "GetMetadataAllocated": "A starting_offset beyond the volume is answered with OUT_OF_RANGE.";
        "Compare the offset with the size of the volume."; [CREATE, SNAPSHOTS, METADATA, Need::Block] metadata_offset;
    "health.controller" Must "ControllerGetVolumeHealth": "ControllerGetVolumeHealth answers for a volume that exists, with its id.";
        "Answer with the volume's health."; [CREATE, Need::Controller(Controller::GetVolumeHealth)] health_controller;
    "health.list" Must "ControllerListVolumeHealth": "ControllerListVolumeHealth succeeds.";
        "Answer with the volumes that are not healthy, or with all."; [CREATE, Need::Controller(Controller::ListVolumeHealth)] health_list;
    "health.node" Must "NodeGetVolumeHealth": "NodeGetVolumeHealth answers for a published volume.";
        "Answer with the volume's health on this node."; [Need::Volumes, Need::Node(Node::GetVolumeHealth)] health_node;
    "health.storage" Must "NodeGetStorageHealth": "NodeGetStorageHealth succeeds.";
        "Answer with the health of the storage behind the driver."; [Need::Node(Node::GetStorageHealth)] health_storage;
    "modify.change" Must "ControllerModifyVolume": "ControllerModifyVolume changes a volume, and succeeds again.";
        "Parameters that are set already are done."; [CREATE, MODIFY, Need::MutableParameters] modify_change;
    "modify.create" Must "CreateVolume": "CreateVolume takes mutable_parameters.";
        "Apply them as ControllerModifyVolume does."; [CREATE, MODIFY, Need::MutableParameters] modify_create;
    "modify.create-unknown" Must "CreateVolume": "CreateVolume refuses mutable_parameters that the driver does not know with INVALID_ARGUMENT.";
        "Check them as ControllerModifyVolume does."; [CREATE, MODIFY] modify_create_unknown;
    "topology.node" Must "NodeGetInfo": "A driver with VOLUME_ACCESSIBILITY_CONSTRAINTS says where its node is.";
        "Set accessible_topology in NodeGetInfo."; [TOPOLOGY] topology_node;
    "topology.create" Must "CreateVolume": "A volume for the node's topology is accessible there.";
        "Answer with an accessible_topology that the request allows."; [CREATE, TOPOLOGY] topology_create;
    "topology.impossible" Must "CreateVolume": "A topology that no node has is refused with RESOURCE_EXHAUSTED.";
        "Create no volume where the request does not allow it (INVALID_ARGUMENT is taken as well)."; [CREATE, TOPOLOGY] topology_impossible;
    "topology.snapshot" Must "CreateSnapshot": "A snapshot for the node's topology is accessible there.";
        "Answer with an accessible_topology that the request allows."; [CREATE, SNAPSHOTS, TOPOLOGY, SNAPSHOT_TOPOLOGY] topology_snapshot;
}

async fn group(
    session: &Session,
) -> Outcome<(v1::CreateVolumeGroupSnapshotRequest, v1::VolumeGroupSnapshot)> {
    let sources = vec![session.volume().await?.volume_id, session.volume().await?.volume_id];
    let request = v1::CreateVolumeGroupSnapshotRequest {
        name: session.name("group"),
        source_volume_ids: sources,
        parameters: session.options.snapshot_parameters.clone(),
        ..Default::default()
    };
    let answer = session.call(request.clone()).await.or_not_run("CreateVolumeGroupSnapshot")?;
    Ok((request, answer.group_snapshot.unwrap_or_default()))
}

async fn group_create(session: &Session) -> Outcome {
    let sources = vec![session.volume().await?.volume_id, session.volume().await?.volume_id];
    let name = session.name("group");
    let request = v1::CreateVolumeGroupSnapshotRequest {
        name,
        source_volume_ids: sources.clone(),
        ..Default::default()
    };
    let answer = session.call(request).await.or_broken("CreateVolumeGroupSnapshot")?;
    let group = answer.group_snapshot.unwrap_or_default();
    ensure(!group.group_snapshot_id.is_empty(), || "the group has no id".to_owned())?;
    for source in &sources {
        let member = group.snapshots.iter().find(|snapshot| snapshot.source_volume_id == *source);
        let Some(member) = member else { return broken(format!("the group has no snapshot of {source:?}")) };
        ensure(member.group_snapshot_id == group.group_snapshot_id, || {
            format!("the member {:?} names the group {:?}", member.snapshot_id, member.group_snapshot_id)
        })?;
    }
    Ok(())
}

async fn group_repeat(session: &Session) -> Outcome {
    let (request, first) = group(session).await?;
    let second = session.call(request).await.or_broken("the second CreateVolumeGroupSnapshot")?;
    let second = second.group_snapshot.unwrap_or_default();
    ensure(first.group_snapshot_id == second.group_snapshot_id, || {
        format!("first {:?}, then {:?}", first.group_snapshot_id, second.group_snapshot_id)
    })
}

fn members(group: &v1::VolumeGroupSnapshot) -> Vec<String> {
    group.snapshots.iter().map(|snapshot| snapshot.snapshot_id.clone()).collect()
}

async fn group_get(session: &Session) -> Outcome {
    let (_, made) = group(session).await?;
    let request = v1::GetVolumeGroupSnapshotRequest {
        group_snapshot_id: made.group_snapshot_id.clone(),
        snapshot_ids: members(&made),
        ..Default::default()
    };
    let answer = session.call(request).await.or_broken("GetVolumeGroupSnapshot")?;
    let found = answer.group_snapshot.unwrap_or_default();
    let (mut expected, mut got) = (members(&made), members(&found));
    expected.sort();
    got.sort();
    ensure(found.group_snapshot_id == made.group_snapshot_id && expected == got, || {
        format!(
            "made was {:?} with {expected:?}, found {:?} with {got:?}",
            made.group_snapshot_id, found.group_snapshot_id
        )
    })
}

async fn group_other_sources(session: &Session) -> Outcome {
    let (request, _) = group(session).await?;
    let other = session.volume().await?.volume_id;
    let request = v1::CreateVolumeGroupSnapshotRequest { source_volume_ids: vec![other], ..request };
    refused(session, request, &[Code::AlreadyExists]).await
}

async fn group_member(session: &Session) -> Outcome {
    let (_, made) = group(session).await?;
    let snapshot_id = members(&made).into_iter().next().unwrap_or_default();
    match session.call(v1::DeleteSnapshotRequest { snapshot_id, ..Default::default() }).await {
        Err(status) if !matches!(status.code(), Code::InvalidArgument) => {
            broken(format!("DeleteSnapshot of a member answered {}", describe(&status)))
        }
        _ => Ok(()),
    }
}

async fn group_restore(session: &Session) -> Outcome {
    let (_, made) = group(session).await?;
    let Some(member) = made.snapshots.first() else { return not_run("the group has no members") };
    let source = Some(from_snapshot(member));
    let request = v1::CreateVolumeRequest { volume_content_source: source, ..session.create_request() };
    session.call(request).await.or_broken("CreateVolume from a member of a group").map(drop)
}

/// What a metadata call answered, all messages together.
struct Blocks {
    capacity: i64,
    blocks: Vec<v1::BlockMetadata>,
}

fn metadata_client(session: &Session) -> SnapshotMetadataClient<Channel> {
    SnapshotMetadataClient::new(berth_csi::connect(session.driver.endpoint()))
}

/// Reads a stream of messages to its end; `part` gives the capacity and the blocks of one.
async fn read_all<M>(
    session: &Session,
    call: impl Future<Output = Result<Response<Streaming<M>>, Status>>,
    part: impl Fn(M) -> (i64, Vec<v1::BlockMetadata>),
) -> Result<Blocks, Status> {
    let read = async {
        let mut stream = call.await?.into_inner();
        let mut all = Blocks { capacity: 0, blocks: Vec::new() };
        while let Some(message) = stream.message().await? {
            let (capacity, blocks) = part(message);
            all.capacity = capacity;
            all.blocks.extend(blocks);
        }
        Ok(all)
    };
    let ended = tokio::time::timeout(session.options.timeout, read).await;
    ended.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer within the time")))
}

async fn allocated(session: &Session, request: v1::GetMetadataAllocatedRequest) -> Result<Blocks, Status> {
    let mut client = metadata_client(session);
    let part =
        |message: v1::GetMetadataAllocatedResponse| (message.volume_capacity_bytes, message.block_metadata);
    read_all(session, client.get_metadata_allocated(request), part).await
}

async fn delta(session: &Session, request: v1::GetMetadataDeltaRequest) -> Result<Blocks, Status> {
    let mut client = metadata_client(session);
    let part =
        |message: v1::GetMetadataDeltaResponse| (message.volume_capacity_bytes, message.block_metadata);
    read_all(session, client.get_metadata_delta(request), part).await
}

fn in_order(found: &Blocks) -> Outcome {
    let mut end = 0;
    for block in &found.blocks {
        ensure(block.byte_offset >= end && block.size_bytes > 0, || {
            format!("the block at {} with {} bytes begins before {end}", block.byte_offset, block.size_bytes)
        })?;
        end = block.byte_offset + block.size_bytes;
    }
    ensure(end <= found.capacity, || {
        format!("the last block ends at {end}; the volume has {}", found.capacity)
    })
}

async fn metadata_allocated(session: &Session) -> Outcome {
    let snapshot_id = session.snapshot(&session.volume().await?).await?.snapshot_id;
    let answer =
        allocated(session, v1::GetMetadataAllocatedRequest { snapshot_id, ..Default::default() }).await;
    match answer {
        Err(status) if status.code() == Code::FailedPrecondition => {
            not_run(format!("the driver has no metadata of this volume: {}", describe(&status)))
        }
        answer => in_order(&answer.or_broken("GetMetadataAllocated")?),
    }
}

async fn metadata_delta(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    let base = session.snapshot(&prepared.volume).await?.snapshot_id;
    session.write(&prepared, "data", &vec![b'd'; 1 << 20]).await.or_not_run("writing at target_path")?;
    let target = session.snapshot(&prepared.volume).await?.snapshot_id;
    let request = v1::GetMetadataDeltaRequest {
        base_snapshot_id: base,
        target_snapshot_id: target,
        ..Default::default()
    };
    let found = match delta(session, request).await {
        Err(status) if status.code() == Code::FailedPrecondition => {
            return not_run(format!("changed blocks are not tracked: {}", describe(&status)));
        }
        answer => answer.or_broken("GetMetadataDelta")?,
    };
    in_order(&found)?;
    let bytes: i64 = found.blocks.iter().map(|block| block.size_bytes).sum();
    ensure(bytes >= 1 << 20, || format!("a mebibyte was written, and {bytes} bytes are said to have changed"))
}

async fn metadata_refused(
    session: &Session,
    request: v1::GetMetadataAllocatedRequest,
    code: Code,
) -> Outcome {
    let expected = berth_csi::code::grpc_name(code);
    match allocated(session, request).await {
        Ok(_) => broken(format!("GetMetadataAllocated answered OK, expected is {expected}")),
        Err(status) if status.code() == code => Ok(()),
        Err(status) if status.code() == Code::FailedPrecondition => not_run(describe(&status)),
        Err(status) => {
            broken(format!("GetMetadataAllocated answered {}, expected is {expected}", describe(&status)))
        }
    }
}

async fn metadata_no_id(session: &Session) -> Outcome {
    metadata_refused(session, v1::GetMetadataAllocatedRequest::default(), Code::InvalidArgument).await
}

async fn metadata_missing(session: &Session) -> Outcome {
    let request = v1::GetMetadataAllocatedRequest { snapshot_id: MISSING.to_owned(), ..Default::default() };
    metadata_refused(session, request, Code::NotFound).await
}

async fn metadata_offset(session: &Session) -> Outcome {
    let snapshot_id = session.snapshot(&session.volume().await?).await?.snapshot_id;
    let request =
        v1::GetMetadataAllocatedRequest { snapshot_id, starting_offset: i64::MAX, ..Default::default() };
    metadata_refused(session, request, Code::OutOfRange).await
}

async fn health_controller(session: &Session) -> Outcome {
    let volume_id = session.volume().await?.volume_id;
    let request = v1::ControllerGetVolumeHealthRequest { volume_id: volume_id.clone(), ..Default::default() };
    let answer = session.call(request).await.or_broken("ControllerGetVolumeHealth")?;
    let found = answer.volume_health.unwrap_or_default().volume_id;
    ensure(found == volume_id, || format!("asked for {volume_id:?}, got {found:?}"))
}

async fn health_list(session: &Session) -> Outcome {
    session.volume().await?;
    let request = v1::ControllerListVolumeHealthRequest::default();
    session.call(request).await.or_broken("ControllerListVolumeHealth").map(drop)
}

async fn health_node(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    session.call(prepared.health_request()).await.or_broken("NodeGetVolumeHealth").map(drop)
}

async fn health_storage(session: &Session) -> Outcome {
    session.call(v1::NodeGetStorageHealthRequest::default()).await.or_broken("NodeGetStorageHealth").map(drop)
}

async fn modify_change(session: &Session) -> Outcome {
    let request = v1::ControllerModifyVolumeRequest {
        volume_id: session.volume().await?.volume_id,
        mutable_parameters: session.options.mutable_parameters.clone(),
        ..Default::default()
    };
    session.call(request.clone()).await.or_broken("ControllerModifyVolume")?;
    session.call(request).await.or_broken("the second ControllerModifyVolume").map(drop)
}

async fn modify_create(session: &Session) -> Outcome {
    session.volume().await?;
    let mutable_parameters = session.options.mutable_parameters.clone();
    let request = v1::CreateVolumeRequest { mutable_parameters, ..session.create_request() };
    session.call(request).await.or_broken("CreateVolume with mutable_parameters").map(drop)
}

async fn modify_create_unknown(session: &Session) -> Outcome {
    let mutable_parameters = [("berth-certify-unknown".to_owned(), "x".to_owned())].into();
    let request = v1::CreateVolumeRequest { mutable_parameters, ..session.create_request() };
    refused(session, request, &[Code::InvalidArgument]).await
}

async fn topology_node(session: &Session) -> Outcome {
    let answer = session.call(v1::NodeGetInfoRequest {}).await.or_not_run("NodeGetInfo")?;
    let has = answer.accessible_topology.is_some_and(|topology| !topology.segments.is_empty());
    ensure(has, || "NodeGetInfo has no accessible_topology".to_owned())
}

async fn topology_create(session: &Session) -> Outcome {
    let Some(node) = session.node.accessible_topology.clone() else {
        return not_run("NodeGetInfo has no accessible_topology");
    };
    let volume = session.volume().await?;
    accessible(&node, "volume", &volume.accessible_topology)
}

/// Something can be used on the node, or says nothing of where it can be.
fn accessible(node: &v1::Topology, what: &str, topologies: &[v1::Topology]) -> Outcome {
    let fits = |topology: &v1::Topology| {
        topology.segments.iter().all(|(key, value)| node.segments.get(key) == Some(value))
    };
    ensure(topologies.is_empty() || topologies.iter().any(fits), || {
        format!("the node is {:?}, the {what} at {topologies:?}", node.segments)
    })
}

async fn topology_snapshot(session: &Session) -> Outcome {
    let Some(node) = session.node.accessible_topology.clone() else {
        return not_run("NodeGetInfo has no accessible_topology");
    };
    let request = v1::CreateSnapshotRequest {
        accessibility_requirements: session.requirements(),
        ..session.snapshot_request(&session.volume().await?)
    };
    let answer = session.call(request).await.or_broken("CreateSnapshot for the node's topology")?;
    accessible(&node, "snapshot", &answer.snapshot.unwrap_or_default().accessible_topology)
}

async fn topology_impossible(session: &Session) -> Outcome {
    let Some(node) = session.node.accessible_topology.clone() else {
        return not_run("NodeGetInfo has no accessible_topology");
    };
    let segments = node.segments.into_keys().map(|key| (key, MISSING.to_owned())).collect();
    let nowhere = v1::Topology { segments };
    let requirements = v1::TopologyRequirement { requisite: vec![nowhere.clone()], preferred: vec![nowhere] };
    let request = v1::CreateVolumeRequest {
        accessibility_requirements: Some(requirements),
        ..session.create_request()
    };
    refused(session, request, &[Code::ResourceExhausted, Code::InvalidArgument]).await
}
