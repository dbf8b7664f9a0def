//! Snapshots, alone and in groups, and what changed between them.

use std::{
    collections::BTreeMap,
    fs::File,
    sync::Arc,
    time::{Duration, SystemTime},
};

use berth_core::{Capacity, GroupSnapshotId, Name, SnapshotId, VolumeId, names::KUBERNETES_PARAMETER_PREFIX};
use berth_host::extents::{self, Range};

use super::{
    Inner, Local,
    content::{self, Capture, Copied},
    kind::Consistency,
    record::{GROUP, GroupRecord, Key, SNAPSHOT, SnapshotRecord, VOLUME, VolumeRecord},
    volumes::{Plan, into_page, page_start, to_json},
};
use crate::{
    BlockRange, Blocks, ChangedBlocks, Context, Error, GroupSnapshot, GroupSnapshots, NewSnapshot, Page,
    PageRequest, Parameters, Result, Snapshot, Snapshots, Volume, image::IMAGE,
};

/// The length of a piece where changed blocks are listed in pieces of one length.
const FIXED_LENGTH: u64 = 4096;

impl Snapshots for Local {
    async fn find_snapshot(&self, ctx: &Context, new: &NewSnapshot) -> Result<Option<Snapshot>> {
        let (key, name) = (Key::of(SNAPSHOT, new.name.as_str()), &new.name);
        let Some(record) = self.0.state().snapshot(key) else { return Ok(None) };
        if *record.name != *name.as_str() {
            return Err(Error::Conflict(format!(
                "the names {:?} and {name:?} have the same hash",
                record.name
            )));
        }
        // Again, for a caller that died before it could record the warnings of its first call.
        parse_parameters(ctx, &new.parameters)?;
        if record.torn {
            ctx.warn(content::TORN);
        }
        Ok(Some(self.0.describe_snapshot(key, &record)))
    }

    async fn take_snapshot(&self, ctx: &Context, new: NewSnapshot, source: &Volume) -> Result<Snapshot> {
        let consistency = parse_parameters(ctx, &new.parameters)?;
        let (source, volume) = self.0.existing_volume(&source.id)?;
        let key = Key::of(SNAPSHOT, new.name.as_str());
        let kind = volume.kind;
        let copied = self.blocking(move |inner| inner.take(&[(key, source, kind)], consistency)).await?;
        if copied == Copied::Torn {
            ctx.warn(content::TORN);
        }
        let torn = copied == Copied::Torn;
        let record = SnapshotRecord { torn, ..new_record(&new.name, source, &volume, now()) };
        let recorded =
            self.0.journal.put(format!("{SNAPSHOT}-{key}"), to_json(&record), super::SNAPSHOTS).await;
        self.undo_unrecorded(recorded, move |inner| inner.discard_snapshots(&[key])).await?;
        let record = self.0.state().put_snapshot(key, record);
        Ok(self.0.describe_snapshot(key, &record))
    }

    async fn snapshot(&self, _: &Context, id: &SnapshotId) -> Result<Option<Snapshot>> {
        Ok(self.0.snapshot(id).map(|(key, record)| self.0.describe_snapshot(key, &record)))
    }

    async fn delete_snapshot(&self, _: &Context, id: &SnapshotId) -> Result<()> {
        let Some(key) = Key::parse(SNAPSHOT, id.as_str()) else { return Ok(()) };
        self.0.journal.remove(format!("{SNAPSHOT}-{key}")).await?;
        self.blocking(move |inner| Ok(inner.trash.discard(&inner.snapshots, &key.to_string())?)).await?;
        // Not before: whoever takes one of the same name now would have it discarded.
        self.0.state().remove_snapshot(key);
        Ok(())
    }

    async fn list_snapshots(
        &self,
        _: &Context,
        source: Option<&VolumeId>,
        page: &PageRequest,
    ) -> Result<Page<Snapshot>> {
        let after = page_start(SNAPSHOT, page)?;
        let take = page.limit.saturating_add(1);
        let state = self.0.state();
        let found: Vec<(Key, Arc<SnapshotRecord>)> = match source {
            None => {
                state.snapshots_after(after).take(take).map(|(key, record)| (key, record.clone())).collect()
            }
            Some(id) => match Key::parse(VOLUME, id.as_str()) {
                None => Vec::new(),
                Some(source) => {
                    let found = state.snapshots_of(source, after).take(take);
                    found.map(|(key, record)| (key, record.clone())).collect()
                }
            },
        };
        drop(state);
        Ok(into_page(SNAPSHOT, page, found, |key, record| self.0.describe_snapshot(key, &record)))
    }

    async fn restore(&self, ctx: &Context, plan: Plan, snapshot: &Snapshot) -> Result<Volume> {
        self.make_from_snapshot(ctx, plan, snapshot).await
    }
}

impl GroupSnapshots for Local {
    async fn find_group(&self, ctx: &Context, name: &Name) -> Result<Option<GroupSnapshot>> {
        let key = Key::of(GROUP, name.as_str());
        let Some(record) = self.0.state().group(key) else { return Ok(None) };
        if *record.name != *name.as_str() {
            return Err(Error::Conflict(format!(
                "the names {:?} and {name:?} have the same hash",
                record.name
            )));
        }
        if record.members.values().any(|member| member.torn) {
            ctx.warn(content::TORN);
        }
        Ok(Some(self.0.describe_group(key, &record)))
    }

    async fn take_group_snapshot(
        &self,
        ctx: &Context,
        name: &Name,
        sources: &[Volume],
        parameters: &Parameters,
    ) -> Result<GroupSnapshot> {
        let consistency = parse_parameters(ctx, parameters)?;
        let group = Key::of(GROUP, name.as_str());
        let created = now();
        let mut members = BTreeMap::new();
        let mut captures = Vec::new();
        for source in sources {
            let (source, volume) = self.0.existing_volume(&source.id)?;
            let key = Key::of_member(group, source);
            captures.push((key, source, volume.kind));
            members.insert(key, new_record(name, source, &volume, created));
        }
        let keys: Vec<Key> = members.keys().copied().collect();
        let copied = self.blocking(move |inner| inner.take(&captures, consistency)).await?;
        if copied == Copied::Torn {
            ctx.warn(content::TORN);
            for member in members.values_mut() {
                member.torn = member.kind == super::Kind::Dir;
            }
        }
        let record = GroupRecord { name: name.as_str().into(), created, members };
        let recorded =
            self.0.journal.put(format!("{GROUP}-{group}"), to_json(&record), super::SNAPSHOTS).await;
        self.undo_unrecorded(recorded, move |inner| inner.discard_snapshots(&keys)).await?;
        let record = self.0.state().put_group(group, record);
        Ok(self.0.describe_group(group, &record))
    }

    async fn group(&self, _: &Context, id: &GroupSnapshotId) -> Result<Option<GroupSnapshot>> {
        let Some(key) = Key::parse(GROUP, id.as_str()) else { return Ok(None) };
        let record = self.0.state().group(key);
        Ok(record.map(|record| self.0.describe_group(key, &record)))
    }

    async fn delete_group(&self, _: &Context, id: &GroupSnapshotId) -> Result<()> {
        let Some(key) = Key::parse(GROUP, id.as_str()) else { return Ok(()) };
        let Some(record) = self.0.state().group(key) else { return Ok(()) };
        self.0.journal.remove(format!("{GROUP}-{key}")).await?;
        self.0.state().remove_group(key);
        let members: Vec<Key> = record.members.keys().copied().collect();
        self.blocking(move |inner| inner.discard_snapshots(&members)).await
    }
}

impl ChangedBlocks for Local {
    async fn allocated(&self, _: &Context, snapshot: &Snapshot, from: u64) -> Result<Blocks> {
        let snapshot = snapshot.id.clone();
        self.blocking(move |inner| {
            let (record, image) = inner.snapshot_image(&snapshot)?;
            Ok(inner.blocks(record.length(), from, extents::allocated(&image, from)?))
        })
        .await
    }

    async fn changed(&self, _: &Context, base: &Snapshot, target: &Snapshot, from: u64) -> Result<Blocks> {
        let (base, target) = (base.id.clone(), target.id.clone());
        self.blocking(move |inner| {
            let (_, base) = inner.snapshot_image(&base)?;
            let (record, target) = inner.snapshot_image(&target)?;
            Ok(inner.blocks(record.length(), from, extents::changed(&base, &target, from)?))
        })
        .await
    }
}

impl Inner {
    fn snapshot(&self, id: &SnapshotId) -> Option<(Key, Arc<SnapshotRecord>)> {
        let key = Key::parse(SNAPSHOT, id.as_str())?;
        Some((key, self.state().snapshot(key)?))
    }

    pub(super) fn existing_snapshot(&self, id: &SnapshotId) -> Result<(Key, Arc<SnapshotRecord>)> {
        self.snapshot(id).ok_or_else(|| Error::no_snapshot(id))
    }

    /// Takes snapshots of volumes at one instant: (snapshot, volume, kind) each.
    fn take(&self, snapshots: &[(Key, Key, super::Kind)], consistency: Consistency) -> Result<Copied> {
        let keys: Vec<Key> = snapshots.iter().map(|(key, ..)| *key).collect();
        self.discard_snapshots(&keys)?;
        let taken = (|| {
            let mut captures = Vec::new();
            for (key, source, kind) in snapshots {
                let name = key.to_string();
                self.trash.discard(&self.incoming, &name)?;
                let (from, to) = (self.volume_dir(*source)?, self.incoming.ensure_dir(&name, 0o700)?);
                captures.push(Capture { source: *source, kind: *kind, from, to, read_only: true });
            }
            let settings = (&self.incoming, &self.devices, self.reflink);
            let copied = content::capture(&captures, settings, consistency)?;
            for key in &keys {
                self.incoming.rename(&key.to_string(), &self.snapshots, &key.to_string())?;
            }
            Ok(copied)
        })();
        if taken.is_err() {
            for key in &keys {
                self.trash.discard(&self.incoming, &key.to_string())?;
            }
            self.discard_snapshots(&keys)?;
        }
        taken
    }

    fn discard_snapshots(&self, keys: &[Key]) -> Result<()> {
        for key in keys {
            self.trash.discard(&self.snapshots, &key.to_string())?;
        }
        Ok(())
    }

    fn describe_snapshot(&self, key: Key, record: &SnapshotRecord) -> Snapshot {
        Snapshot {
            id: key.id(SNAPSHOT),
            source: record.source.id(VOLUME),
            size: Capacity::new(record.size),
            access: Some(record.access),
            created: record.created,
            ready: true,
            group: record.group.map(|group| group.id(GROUP)),
            topology: self.topology.clone(),
        }
    }

    fn describe_group(&self, key: Key, record: &GroupRecord) -> GroupSnapshot {
        let member = |(member, snapshot): (&Key, &SnapshotRecord)| {
            self.describe_snapshot(*member, &SnapshotRecord { group: Some(key), ..snapshot.clone() })
        };
        GroupSnapshot {
            id: key.id(GROUP),
            snapshots: record.members.iter().map(member).collect(),
            created: record.created,
        }
    }

    fn snapshot_image(&self, id: &SnapshotId) -> Result<(Arc<SnapshotRecord>, File)> {
        let (key, record) = self.existing_snapshot(id)?;
        if record.kind != super::Kind::Image {
            return Err(Error::Invalid(format!("snapshot {id:?} is not of a raw block volume")));
        }
        let image = self.snapshots.open_file(&format!("{key}/{IMAGE}"), false)?;
        Ok((record, image))
    }

    fn blocks(
        &self,
        size: u64,
        from: u64,
        ranges: impl Iterator<Item = berth_host::Result<Range>> + Send + 'static,
    ) -> Blocks {
        let fixed_length = self.config.fixed_length_blocks;
        let ranges = ranges.map(|range| range.map_err(Error::from));
        Blocks {
            capacity: Capacity::new(size),
            fixed_length,
            ranges: if fixed_length {
                Box::new(in_pieces(from, ranges))
            } else {
                Box::new(
                    ranges.map(|range| range.map(|Range { offset, length }| BlockRange { offset, length })),
                )
            },
        }
    }
}

/// Ranges cut into whole pieces of [`FIXED_LENGTH`], none twice.
fn in_pieces(
    from: u64,
    ranges: impl Iterator<Item = Result<Range>> + Send,
) -> impl Iterator<Item = Result<BlockRange>> + Send {
    let mut next = from - from % FIXED_LENGTH;
    ranges.flat_map(move |range| {
        let (pieces, error) = match range {
            Err(error) => (None, Some(Err(error))),
            Ok(range) => {
                let start = (range.offset - range.offset % FIXED_LENGTH).max(next);
                let end = (range.offset + range.length).next_multiple_of(FIXED_LENGTH);
                next = end.max(next);
                let piece =
                    move |index| BlockRange { offset: start + index * FIXED_LENGTH, length: FIXED_LENGTH };
                let count = end.saturating_sub(start) / FIXED_LENGTH;
                (Some((0..count).map(move |index| Ok(piece(index)))), None)
            }
        };
        pieces.into_iter().flatten().chain(error)
    })
}

fn new_record(name: &Name, source: Key, volume: &VolumeRecord, created: SystemTime) -> SnapshotRecord {
    SnapshotRecord {
        name: name.as_str().into(),
        source,
        size: volume.size,
        kind: volume.kind,
        access: volume.access,
        filesystem: volume.filesystem,
        created,
        torn: false,
        group: None,
    }
}

/// The time in whole microseconds, which survives every clock format on the way.
fn now() -> SystemTime {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    SystemTime::UNIX_EPOCH + Duration::from_micros(u64::try_from(since.as_micros()).unwrap_or_default())
}

/// Reads the parameters of a snapshot class. Unknown ones are ignored with a warning, as upstream's drivers ignore them:
/// classes that Kubernetes' own tests and users write carry parameters of other drivers.
fn parse_parameters(ctx: &Context, parameters: &Parameters) -> Result<Consistency> {
    let mut consistency = Consistency::default();
    for (key, value) in parameters {
        match key.as_str() {
            Consistency::PARAMETER => consistency = value.parse()?,
            // The host-path driver's classes carry this one; copies here never skip what they cannot read.
            "ignoreFailedRead" => {}
            key if key.starts_with(KUBERNETES_PARAMETER_PREFIX) => {}
            key => ctx.warn(format!(
                "the snapshot class's parameter {key:?} is not known to this driver and has no effect"
            )),
        }
    }
    Ok(consistency)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_become_whole_pieces_and_none_comes_twice() {
        let ranges = [(100, 100), (4000, 200), (20_000, 1)];
        let ranges = ranges.into_iter().map(|(offset, length)| Ok(Range { offset, length }));
        let pieces: Vec<u64> = in_pieces(0, ranges).map(|piece| piece.unwrap().offset).collect();
        assert_eq!(pieces, [0, 4096, 16384]);
    }
}
