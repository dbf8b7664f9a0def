//! The SnapshotMetadata service: which parts of a raw snapshot hold data, and which changed.
//!
//! The ranges are produced on a blocking thread as fast as the caller takes them, and no further once it is gone.

use std::iter;

use berth_core::AccessKind;
use berth_csi::v1::{
    BlockMetadata, BlockMetadataType, GetMetadataAllocatedRequest, GetMetadataAllocatedResponse,
    GetMetadataDeltaRequest, GetMetadataDeltaResponse, snapshot_metadata_server::SnapshotMetadata,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, codegen::BoxStream};

use super::{Reply, Services, controller::existing_snapshot};
use crate::{
    BlockRange, Blocks, Error, Result, Snapshot,
    call::{
        self,
        snapshots::{Allocated, Delta, Part},
    },
    erased::{DynChangedBlocks, DynSnapshots},
    locks::{Guard, Hold, Key},
};

/// Messages produced ahead of the caller.
const AHEAD: usize = 4;

#[tonic::async_trait]
impl SnapshotMetadata for Services {
    async fn get_metadata_allocated(
        &self,
        request: Request<GetMetadataAllocatedRequest>,
    ) -> Reply<BoxStream<GetMetadataAllocatedResponse>> {
        let (snapshots, blocks) = self.changed_blocks()?;
        let (ctx, call) = call::read::<_, Allocated>(request)?;
        let guard = self.lock([(Key::Snapshot(call.snapshot.clone()), Hold::Shared)])?;
        let snapshot = existing_snapshot(&ctx, snapshots, &call.snapshot).await?;
        let from = starting_offset(&snapshot, call.part)?;
        let blocks = blocks.allocated(&ctx, &snapshot, from).await?;
        Ok(Response::new(stream(blocks, call.part, guard, |kind, capacity, ranges| {
            GetMetadataAllocatedResponse {
                block_metadata_type: kind.into(),
                volume_capacity_bytes: capacity,
                block_metadata: ranges,
            }
        })))
    }

    async fn get_metadata_delta(
        &self,
        request: Request<GetMetadataDeltaRequest>,
    ) -> Reply<BoxStream<GetMetadataDeltaResponse>> {
        let (snapshots, blocks) = self.changed_blocks()?;
        let (ctx, call) = call::read::<_, Delta>(request)?;
        let keys = [&call.base, &call.target].map(|id| (Key::Snapshot(id.clone()), Hold::Shared));
        let guard = self.lock(keys)?;
        let base = existing_snapshot(&ctx, snapshots, &call.base).await?;
        let target = existing_snapshot(&ctx, snapshots, &call.target).await?;
        check_comparable(&base, &target)?;
        let from = starting_offset(&target, call.part)?;
        let blocks = blocks.changed(&ctx, &base, &target, from).await?;
        Ok(Response::new(stream(blocks, call.part, guard, |kind, capacity, ranges| {
            GetMetadataDeltaResponse {
                block_metadata_type: kind.into(),
                volume_capacity_bytes: capacity,
                block_metadata: ranges,
            }
        })))
    }
}

impl Services {
    fn changed_blocks(&self) -> std::result::Result<(&dyn DynSnapshots, &dyn DynChangedBlocks), Status> {
        let parts = &self.controller()?.parts;
        let snapshots = self.part(parts.snapshots.as_deref(), "snapshots")?;
        Ok((snapshots, self.part(parts.changed_blocks.as_deref(), "snapshot metadata")?))
    }
}

fn check_comparable(base: &Snapshot, target: &Snapshot) -> Result<()> {
    if base.source == target.source {
        return check_raw(base);
    }
    Err(Error::Invalid(format!(
        "snapshots {:?} and {:?} are of different volumes and cannot be compared",
        base.id, target.id
    )))
}

fn check_raw(snapshot: &Snapshot) -> Result<()> {
    match snapshot.access {
        Some(AccessKind::Block) | None => Ok(()),
        Some(AccessKind::Mount) => Err(Error::Invalid(format!(
            "snapshot {:?} is of a filesystem, not of a block volume",
            snapshot.id
        ))),
    }
}

fn starting_offset(snapshot: &Snapshot, part: Part) -> Result<u64> {
    check_raw(snapshot)?;
    let offset = part.starting_offset;
    u64::try_from(offset).ok().filter(|from| *from <= snapshot.size.bytes()).ok_or_else(|| {
        let size = snapshot.size.bytes();
        Error::OutOfRange(format!("starting_offset {offset} is not within the snapshot's {size} bytes"))
    })
}

/// Sends what `blocks` produces; the snapshots stay locked until the last message is sent.
fn stream<T: Send + 'static>(
    blocks: Blocks,
    part: Part,
    guard: Guard,
    message: fn(BlockMetadataType, i64, Vec<BlockMetadata>) -> T,
) -> BoxStream<T> {
    let (sender, receiver) = mpsc::channel(AHEAD);
    tokio::task::spawn_blocking(move || {
        let _guard = guard;
        let kind = if blocks.fixed_length {
            BlockMetadataType::FixedLength
        } else {
            BlockMetadataType::VariableLength
        };
        let capacity = blocks.capacity.as_i64();
        let mut ranges = blocks.ranges;
        let batches = iter::from_fn(|| {
            let batch: Result<Vec<_>> =
                ranges.by_ref().take(part.ranges_per_message).map(|range| range.map(metadata)).collect();
            Some(batch).filter(|batch| !matches!(batch, Ok(batch) if batch.is_empty()))
        });
        for batch in batches {
            let failed = batch.is_err();
            let sent =
                sender.blocking_send(batch.map(|batch| message(kind, capacity, batch)).map_err(Status::from));
            // Nobody listens any more, or there is no way to go on after the error.
            if sent.is_err() || failed {
                break;
            }
        }
    });
    Box::pin(ReceiverStream::new(receiver))
}

fn metadata(range: BlockRange) -> BlockMetadata {
    let number = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    BlockMetadata { byte_offset: number(range.offset), size_bytes: number(range.length) }
}
