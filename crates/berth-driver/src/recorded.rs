//! For storage that remembers nothing: the framework keeps a record of each volume.

mod attachments;
mod snapshots;

use std::{
    collections::{BTreeMap, hash_map::RandomState},
    future::Future,
    hash::{BuildHasher as _, Hasher as _},
    io,
    path::Path,
    sync::Arc,
};

use berth_core::{AccessKind, Capacity, CapacityRange, Name, Topology, VolumeId};
use berth_host::path::Dir;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest as _, Sha256};

use self::attachments::AttachmentRecord;
use crate::{
    Cloning, ContentSource, Context, Error, Expanded, Expansion, FromParameters, InlineVolumes, Listing,
    NewVolume, Page, PageRequest, Parameters, Result, Supports, Volume, Volumes, blocking,
};

pub use self::{attachments::ProvisionAttachment, snapshots::ProvisionSnapshots};

const SUFFIX: &str = ".json";
/// What a name begins with that is a digest of another.
const DIGEST: &str = "sha256_";
/// What a listing's tokens begin with; any other token was never given.
const TOKEN: &str = "after ";

/// Makes and removes volumes, whose records the framework keeps ([`Recorded`]): the smallest way to write a driver.
pub trait Provision: Send + Sync + 'static {
    /// The class's parameters, read once; `()` for none.
    type Class: FromParameters;

    /// What volumes can be used as.
    fn supports(&self) -> Supports {
        Supports::filesystem()
    }

    /// Makes the volume of that id. It may find what an attempt has left that was cut off, and goes on with it.
    fn create(
        &self,
        ctx: &Context,
        id: &VolumeId,
        new: &NewVolume,
        class: &Self::Class,
    ) -> impl Future<Output = Result<Volume>> + Send;

    /// Removes it, or what is left of it; `Ok` if nothing is there. The class is the one that it was made with.
    fn delete(
        &self,
        ctx: &Context,
        id: &VolumeId,
        class: &Self::Class,
    ) -> impl Future<Output = Result<()>> + Send;
}

/// Recorded volumes can be made of recorded volumes.
pub trait ProvisionCloning: Provision {
    /// As [`Provision::create`], with the content that `source` has now.
    fn clone_volume(
        &self,
        ctx: &Context,
        id: &VolumeId,
        new: &NewVolume,
        class: &Self::Class,
        source: &Volume,
    ) -> impl Future<Output = Result<Volume>> + Send;
}

/// Recorded volumes can be made larger.
pub trait ProvisionExpansion: Provision {
    /// Whether also while they are in use.
    fn online(&self) -> bool {
        true
    }

    /// Grows to a size in the range; `Ok` if the volume has one already.
    fn grow(
        &self,
        ctx: &Context,
        volume: &Volume,
        range: CapacityRange,
    ) -> impl Future<Output = Result<Expanded>> + Send;
}

/// [`Provision`] with a record per volume, as [`Volumes`], [`Listing`] and [`InlineVolumes`].
///
/// An id is the volume's name with a random suffix, so that a file of that name that somebody else made is never taken
/// for a volume. What has no record is never touched: the record says "creating" before the backend is asked to make
/// anything, and "deleting" until it is gone.
///
/// Where the backend also implements [`ProvisionCloning`], [`ProvisionExpansion`], [`ProvisionAttachment`] or
/// [`ProvisionSnapshots`], this is [`Cloning`], [`Expansion`], [`crate::Attachment`] or [`crate::Snapshots`] too.
pub struct Recorded<B> {
    backend: Arc<B>,
    records: Arc<Dir>,
}

impl<B: Provision> Recorded<B> {
    /// Records are kept in that directory. On the storage itself they survive the machine that the controller runs on.
    pub fn open(backend: &Arc<B>, directory: impl AsRef<Path>) -> Result<Arc<Self>> {
        let records = Arc::new(Dir::ensure(directory.as_ref(), 0o700)?);
        Ok(Arc::new(Self { backend: backend.clone(), records }))
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Dir) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let records = self.records.clone();
        blocking(move || work(&records)).await
    }

    async fn read(&self, stem: &str) -> Result<Option<Record>> {
        let stem = stem.to_owned();
        self.blocking(move |records| read(records, &stem)).await
    }

    /// The record of an id, where it is of that id.
    async fn record_of(&self, id: &VolumeId) -> Result<Option<(String, Record)>> {
        let Some(stem) = stem_of_id(id.as_str()) else { return Ok(None) };
        let found = self.read(stem).await?.filter(|record| record.id == id.as_str());
        Ok(found.map(|record| (stem.to_owned(), record)))
    }

    async fn write(&self, stem: &str, record: Record) -> Result<Record> {
        let stem = stem.to_owned();
        self.blocking(move |records| write(records, &stem, &record).map(|()| record)).await
    }

    async fn forget(&self, stem: &str) -> Result<()> {
        let stem = stem.to_owned();
        self.blocking(move |records| remove(records, &stem)).await
    }

    /// Makes a volume by `work`, with a record before and after.
    async fn make(
        &self,
        ctx: &Context,
        plan: Plan<B::Class>,
        source: Option<ContentSource>,
        work: impl AsyncFnOnce(&VolumeId, &Plan<B::Class>) -> Result<Volume>,
    ) -> Result<Volume> {
        let (stem, new) = (&plan.stem, &plan.new);
        let id: VolumeId = match self.read(stem).await? {
            // An attempt that was cut off, or a deletion that did not come to its end.
            Some(begun) => begun.id,
            None => unused_id(stem),
        }
        .parse()
        .map_err(|error| Error::internal(format!("make an id of the name {:?}: {error}", new.name)))?;
        let record = self.write(stem, Record::begun(&id, new, source)).await?;
        let made = match work(&id, &plan).await {
            Ok(made) => self.write(stem, record.created(&made)).await.and_then(Record::volume),
            // It goes on, and the same call will find it.
            Err(error @ Error::Busy(_)) => return Err(error),
            Err(error) => Err(error),
        };
        let Err(error) = made else { return made };
        // No caller got it as an answer. What cannot be taken back keeps its record, and a repeated call goes on.
        let taken_back = async {
            self.backend.delete(ctx, &id, &plan.class).await?;
            self.forget(stem).await
        };
        match taken_back.await {
            Ok(()) => Err(error),
            Err(left) => Err(error.unfinished(&left)),
        }
    }
}

/// A volume to make.
pub struct Plan<C> {
    stem: String,
    new: NewVolume,
    class: C,
}

impl<B: Provision> Volumes for Recorded<B> {
    type Plan = Plan<B::Class>;

    fn supports(&self) -> Supports {
        self.backend.supports()
    }

    fn plan(&self, _: &Context, new: &NewVolume) -> Result<Self::Plan> {
        let class = B::Class::from_parameters(&new.parameters)?;
        Ok(Plan { stem: stem_of(new.name.as_str()), new: new.clone(), class })
    }

    async fn find(&self, _: &Context, plan: &Self::Plan) -> Result<Option<Volume>> {
        self.read(&plan.stem)
            .await?
            .filter(|record| record.state == State::Created)
            .map(Record::volume)
            .transpose()
    }

    async fn create(&self, ctx: &Context, plan: Self::Plan) -> Result<Volume> {
        let backend = self.backend.clone();
        self.make(ctx, plan, None, async |id, Plan { new, class, .. }| {
            backend.create(ctx, id, new, class).await
        })
        .await
    }

    async fn get(&self, _: &Context, id: &VolumeId) -> Result<Option<Volume>> {
        let found = self.record_of(id).await?;
        found
            .filter(|(_, record)| record.state == State::Created)
            .map(|(_, record)| record.volume())
            .transpose()
    }

    async fn delete(&self, ctx: &Context, id: &VolumeId) -> Result<()> {
        let Some((stem, record)) = self.record_of(id).await? else { return Ok(()) };
        let class = B::Class::from_parameters(&record.parameters)?;
        self.write(&stem, Record { state: State::Deleting, ..record }).await?;
        self.backend.delete(ctx, id, &class).await?;
        self.forget(&stem).await
    }
}

impl<B: ProvisionCloning> Cloning for Recorded<B> {
    async fn clone_volume(&self, ctx: &Context, plan: Self::Plan, source: &Volume) -> Result<Volume> {
        let (backend, origin) = (self.backend.clone(), Some(ContentSource::Volume(source.id.clone())));
        self.make(ctx, plan, origin, async |id, Plan { new, class, .. }| {
            backend.clone_volume(ctx, id, new, class, source).await
        })
        .await
    }
}

impl<B: ProvisionExpansion> Expansion for Recorded<B> {
    fn online(&self) -> bool {
        self.backend.online()
    }

    async fn expand(&self, ctx: &Context, volume: &Volume, range: CapacityRange) -> Result<Expanded> {
        let expanded = self.backend.grow(ctx, volume, range).await?;
        if let Some((stem, record)) = self.record_of(&volume.id).await? {
            self.write(&stem, Record { capacity: expanded.capacity.bytes(), ..record }).await?;
        }
        Ok(expanded)
    }
}

impl<B: Provision> InlineVolumes for Recorded<B> {
    async fn find_inline(&self, _: &Context, name: &Name) -> Result<Option<Volume>> {
        let found = self.read(&stem_of(name.as_str())).await?;
        found.filter(|record| record.state == State::Created).map(Record::volume).transpose()
    }
}

impl<B: Provision> Listing for Recorded<B> {
    async fn list(&self, _: &Context, wanted: &PageRequest) -> Result<Page<Volume>> {
        let wanted = wanted.clone();
        self.blocking(move |records| {
            page(records, &wanted, |record: Record| {
                (record.state == State::Created).then(|| record.volume()).transpose()
            })
        })
        .await
    }
}

/// One page of what `entry` makes of the records.
fn page<R: DeserializeOwned, T>(
    records: &Dir,
    wanted: &PageRequest,
    entry: impl Fn(R) -> Result<Option<T>>,
) -> Result<Page<T>> {
    let after = wanted.after.as_ref().map(|token| match token.strip_prefix(TOKEN) {
        Some(stem) => Ok(stem.to_owned()),
        None => Err(Error::in_progress("starting_token was not given out by this driver")),
    });
    let after = after.transpose()?;
    let mut stems: Vec<String> = records
        .entries()?
        .into_iter()
        .filter_map(|entry| Some(entry.name.to_str()?.strip_suffix(SUFFIX)?.to_owned()))
        .filter(|stem| after.as_ref().is_none_or(|after| stem > after))
        .collect();
    stems.sort_unstable();
    let (mut entries, mut last) = (Vec::new(), None);
    for stem in stems {
        let Some(found) = read(records, &stem)?.map(&entry).transpose()?.flatten() else { continue };
        if entries.len() == wanted.limit {
            return Ok(Page { entries, next: last.map(|last| format!("{TOKEN}{last}")) });
        }
        entries.push(found);
        last = Some(stem);
    }
    Ok(Page { entries, next: None })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum State {
    Creating,
    Created,
    Deleting,
}

/// What is written down about a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    id: String,
    state: State,
    parameters: Parameters,
    block: bool,
    #[serde(default)]
    ephemeral: bool,
    #[serde(default)]
    capacity: u64,
    #[serde(default)]
    context: BTreeMap<String, String>,
    #[serde(default)]
    topology: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    source: Option<SourceRecord>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    attachments: Vec<AttachmentRecord>,
}

/// Where a volume's first content came from, by id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum SourceRecord {
    Snapshot(String),
    Volume(String),
}

impl From<ContentSource> for SourceRecord {
    fn from(source: ContentSource) -> Self {
        match source {
            ContentSource::Snapshot(id) => Self::Snapshot(id.to_string()),
            ContentSource::Volume(id) => Self::Volume(id.to_string()),
        }
    }
}

impl SourceRecord {
    fn source(&self) -> Result<ContentSource> {
        let broken = |error: berth_core::InvalidId| Error::internal(format!("a record's source: {error}"));
        Ok(match self {
            Self::Snapshot(id) => ContentSource::Snapshot(id.parse().map_err(broken)?),
            Self::Volume(id) => ContentSource::Volume(id.parse().map_err(broken)?),
        })
    }
}

impl Record {
    fn begun(id: &VolumeId, new: &NewVolume, source: Option<ContentSource>) -> Self {
        Self {
            id: id.to_string(),
            state: State::Creating,
            parameters: new.parameters.clone(),
            block: new.access() == AccessKind::Block,
            ephemeral: new.ephemeral,
            capacity: 0,
            context: BTreeMap::new(),
            topology: None,
            source: source.map(SourceRecord::from),
            attachments: Vec::new(),
        }
    }

    fn created(self, made: &Volume) -> Self {
        Self {
            state: State::Created,
            capacity: made.capacity.bytes(),
            context: made.context.clone(),
            topology: made.topology.as_ref().map(|topology| topology.0.clone()),
            ..self
        }
    }

    fn volume(self) -> Result<Volume> {
        let id = self.id.parse().map_err(|error| Error::internal(format!("a record's id: {error}")))?;
        Ok(Volume {
            access: Some(if self.block { AccessKind::Block } else { AccessKind::Mount }),
            parameters: Arc::new(self.parameters),
            context: self.context,
            topology: self.topology.map(|segments| Arc::new(Topology(segments))),
            ephemeral: self.ephemeral,
            source: self.source.as_ref().map(SourceRecord::source).transpose()?,
            attachments: self.attachments.iter().map(AttachmentRecord::attached).collect::<Result<_>>()?,
            ..Volume::new(id, Capacity::new(self.capacity))
        })
    }
}

fn write(records: &Dir, stem: &str, record: &impl Serialize) -> Result<()> {
    let json = serde_json::to_vec(record).expect("a record always becomes JSON");
    Ok(records.write_atomically(&format!("{stem}{SUFFIX}"), &json)?)
}

fn remove(records: &Dir, stem: &str) -> Result<()> {
    Ok(records.remove_written(&format!("{stem}{SUFFIX}")).map(drop)?)
}

fn read<R: DeserializeOwned>(records: &Dir, stem: &str) -> Result<Option<R>> {
    let name = format!("{stem}{SUFFIX}");
    let file = match records.open_file(&name, false) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let record = serde_json::from_reader(io::BufReader::new(file));
    record.map(Some).map_err(|error| Error::State(format!("the record {name} cannot be understood: {error}")))
}

/// A name as a file name: itself if it is a plain one, else a digest of it.
fn stem_of(name: &str) -> String {
    // What looks like a digest is no plain name.
    if is_stem(name) && !name.starts_with(DIGEST) {
        return name.to_owned();
    }
    format!("{DIGEST}{}", berth_core::hex(&Sha256::digest(name)[..16]))
}

/// The name of the record of an id, if there can be one.
fn stem_of_id(id: &str) -> Option<&str> {
    id.rsplit_once('-').map(|(stem, _)| stem).filter(|stem| is_stem(stem))
}

/// An id that nothing has yet.
fn unused_id(stem: &str) -> String {
    format!("{stem}-{:08x}", RandomState::new().build_hasher().finish() >> 32)
}

/// Whether a record may be called that.
fn is_stem(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    (1..=100).contains(&text.len()) && text.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use berth_core::{Access, AccessMode, CapacityRange, VolumeCapability};
    use parking_lot::Mutex;

    use super::*;

    /// Volumes that are entries of a list; making one may fail, and so may taking it back.
    #[derive(Default)]
    struct List {
        made: Mutex<Vec<VolumeId>>,
        fault: Mutex<Option<fn() -> Error>>,
        stuck: Mutex<bool>,
        /// Removed while a volume is made.
        removed: Mutex<Option<std::path::PathBuf>>,
    }

    impl Provision for List {
        type Class = ();

        async fn create(&self, _: &Context, id: &VolumeId, new: &NewVolume, (): &()) -> Result<Volume> {
            self.made.lock().push(id.clone());
            if let Some(removed) = self.removed.lock().take() {
                std::fs::remove_dir_all(removed).unwrap();
            }
            match *self.fault.lock() {
                Some(fault) => Err(fault()),
                None => Ok(Volume::new(id.clone(), new.range.choose(Capacity::gibibytes(1)))),
            }
        }

        async fn delete(&self, _: &Context, id: &VolumeId, (): &()) -> Result<()> {
            if *self.stuck.lock() {
                return Err(Error::internal("stuck"));
            }
            self.made.lock().retain(|made| made != id);
            Ok(())
        }
    }

    fn named(name: &str) -> NewVolume {
        let access = Access::Mount { fs_type: String::new(), flags: Vec::new(), group: None };
        NewVolume {
            name: name.parse().unwrap(),
            range: CapacityRange::default(),
            capabilities: vec![VolumeCapability { access, mode: AccessMode::SingleNodeWriter }],
            parameters: Parameters::new(),
            mutable: Parameters::new(),
            ephemeral: false,
        }
    }

    #[tokio::test]
    async fn a_volume_is_found_again_whatever_its_name_and_gone_when_deleted() {
        let (dir, ctx, list) = (tempfile::tempdir().unwrap(), Context::default(), Arc::new(List::default()));
        let mut ids = Vec::new();
        let long = "x".repeat(128);
        for name in ["pvc-1", "../../etc/passwd", ".", "sha256_0", &long] {
            let volumes = Recorded::open(&list, dir.path()).unwrap();
            let plan = |name| volumes.plan(&ctx, &named(name)).unwrap();
            assert!(volumes.find(&ctx, &plan(name)).await.unwrap().is_none(), "{name}");
            let volume = volumes.create(&ctx, plan(name)).await.unwrap();
            // Another process finds it by its name and by its id.
            let volumes = Recorded::open(&list, dir.path()).unwrap();
            assert_eq!(volumes.find(&ctx, &plan(name)).await.unwrap().unwrap().id, volume.id, "{name}");
            assert_eq!(volumes.get(&ctx, &volume.id).await.unwrap().unwrap().capacity, volume.capacity);
            ids.push(volume.id);
        }
        let volumes = Recorded::open(&list, dir.path()).unwrap();
        let page = PageRequest { after: None, limit: 3 };
        let first = volumes.list(&ctx, &page).await.unwrap();
        let rest = volumes.list(&ctx, &PageRequest { after: first.next, ..page }).await.unwrap();
        assert_eq!((first.entries.len(), rest.entries.len(), rest.next), (3, 2, None));
        for id in &ids {
            volumes.delete(&ctx, id).await.unwrap();
            volumes.delete(&ctx, id).await.unwrap();
            assert!(volumes.get(&ctx, id).await.unwrap().is_none());
        }
        assert!(list.made.lock().is_empty());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_creation_that_fails_is_taken_back_and_one_that_goes_on_keeps_its_id() {
        let (dir, ctx, list) = (tempfile::tempdir().unwrap(), Context::default(), Arc::new(List::default()));
        let volumes = Recorded::open(&list, dir.path()).unwrap();
        let create = || volumes.create(&ctx, volumes.plan(&ctx, &named("v")).unwrap());
        *list.fault.lock() = Some(|| Error::exhausted("full"));
        assert!(matches!(create().await, Err(Error::Exhausted(_))));
        assert!(list.made.lock().is_empty());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

        *list.fault.lock() = Some(|| Error::in_progress("copying"));
        assert!(matches!(create().await, Err(Error::Busy(_))));
        let begun = list.made.lock().pop().unwrap();
        assert!(volumes.get(&ctx, &begun).await.unwrap().is_none(), "not before it is done");
        *list.fault.lock() = None;
        assert_eq!(create().await.unwrap().id, begun);
    }

    #[tokio::test]
    async fn what_cannot_be_taken_back_is_asked_for_again_and_not_forgotten() {
        let (dir, ctx, list) = (tempfile::tempdir().unwrap(), Context::default(), Arc::new(List::default()));
        let volumes = Recorded::open(&list, dir.path()).unwrap();
        let create = || volumes.create(&ctx, volumes.plan(&ctx, &named("v")).unwrap());
        for fault in [|| Error::internal("half way"), || Error::exhausted("full")] {
            (*list.fault.lock(), *list.stuck.lock()) = (Some(fault), true);
            let failed = create().await;
            assert!(
                matches!(&failed, Err(Error::Unavailable(why)) if why.ends_with("taken back yet: stuck")),
                "{failed:?}"
            );
        }
        let begun = list.made.lock().pop().unwrap();
        list.made.lock().clear();
        (*list.fault.lock(), *list.stuck.lock()) = (None, false);
        assert_eq!(create().await.unwrap().id, begun, "its record was kept");
    }

    #[tokio::test]
    async fn a_volume_that_cannot_be_recorded_is_taken_back() {
        let (dir, ctx, list) = (tempfile::tempdir().unwrap(), Context::default(), Arc::new(List::default()));
        let records = dir.path().join("records");
        let volumes = Recorded::open(&list, &records).unwrap();
        *list.removed.lock() = Some(records);
        let failed = volumes.create(&ctx, volumes.plan(&ctx, &named("v")).unwrap()).await;
        assert!(failed.is_err(), "{failed:?}");
        assert!(list.made.lock().is_empty());
    }
}
