//! Volumes of a class, and those that somebody wrote PersistentVolumes for.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use berth_core::{Capacity, VolumeId};
use berth_host::path::Dir;

use super::{DIRECTORY, Flex, ID_VARIABLE};
use crate::{
    Context, Error, NewVolume, Parameters, Provision, Recorded, Result, Supports, Volume, Volumes, blocking,
};

/// The size of a volume for which none is asked.
const DEFAULT_SIZE: Capacity = Capacity::gibibytes(1);

impl Provision for Flex {
    type Class = BTreeMap<String, String>;

    fn supports(&self) -> Supports {
        // FlexVolume does not say, and the kubelet does not ask.
        Supports::filesystem().on_many_nodes()
    }

    async fn create(
        &self,
        _: &Context,
        id: &VolumeId,
        new: &NewVolume,
        class: &Self::Class,
    ) -> Result<Volume> {
        if !class.values().any(|value| value.contains(ID_VARIABLE)) {
            return Err(Error::Invalid(format!(
                "no parameter of the class has {ID_VARIABLE} in it, so all its volumes would be the same; give it the \
                 parameter {DIRECTORY}, or write PersistentVolumes by hand"
            )));
        }
        let context = expand(class, id);
        if let Some(directory) = self.directory_of(class, id)? {
            self.within(id, &context, move |root| {
                let mut here = root;
                for name in directory.split('/') {
                    here = here.ensure_dir(name, 0o777)?;
                }
                Ok(here.sync()?)
            })
            .await?;
        }
        let mut volume = Volume::new(id.clone(), new.range.choose(DEFAULT_SIZE));
        volume.context = context;
        Ok(volume)
    }

    async fn delete(&self, _: &Context, id: &VolumeId, class: &Self::Class) -> Result<()> {
        let Some(directory) = self.directory_of(class, id)? else { return Ok(()) };
        self.within(id, &expand(class, id), move |root| {
            let (parent, name) = directory.rsplit_once('/').unwrap_or(("", &directory));
            let parent = match if parent.is_empty() { Ok(root) } else { root.dir(parent) } {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
                parent => parent?,
            };
            Ok(parent.remove_tree(name).map(drop)?)
        })
        .await
    }
}

impl Flex {
    /// The directory that a class gives a volume, where it does; it belongs to that volume alone.
    fn directory_of(&self, class: &BTreeMap<String, String>, id: &VolumeId) -> Result<Option<String>> {
        let Some(template) = class.get(DIRECTORY) else { return Ok(None) };
        let refuse = |why: &str| Err(Error::Invalid(format!("parameter {DIRECTORY:?}: {template:?} {why}")));
        if self.attaches() {
            return refuse("cannot be used: the driver attaches volumes, of which each is whole");
        }
        let last = template.trim_matches('/').rsplit('/').next().unwrap_or_default();
        if !last.contains(ID_VARIABLE) {
            return refuse(&format!("does not end with a name that has {ID_VARIABLE} in it"));
        }
        let directory = template.trim_matches('/').replace(ID_VARIABLE, id.as_str());
        if directory.split('/').any(|part| matches!(part, "" | "." | "..") || part.contains('\0')) {
            return refuse("is not a path of plain names");
        }
        Ok(Some(directory))
    }

    /// Does something in what the driver mounts for these options, mounted for as long as that takes.
    async fn within(
        &self,
        id: &VolumeId,
        context: &BTreeMap<String, String>,
        work: impl FnOnce(Dir) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let at: PathBuf =
            self.hidden(&format!("{}.incoming", crate::records::key("volume", id.as_str().as_bytes())));
        self.unmount_by_driver(&at).await?;
        let options = super::options_of(id, context, "", false)?;
        let mounted = self.required_mount(&at, options).await;
        let here = at.clone();
        let done = match mounted {
            Ok(()) => blocking(move || work(Dir::open(&here)?)).await,
            failed => failed,
        };
        self.unmount_by_driver(&at).await?;
        let _ = std::fs::remove_dir(&at);
        done
    }
}

/// The class's parameters as they are for one volume.
fn expand(class: &BTreeMap<String, String>, id: &VolumeId) -> BTreeMap<String, String> {
    let mut context: BTreeMap<_, _> =
        class.iter().map(|(key, value)| (key.clone(), value.replace(ID_VARIABLE, id.as_str()))).collect();
    if let Some(directory) = context.get_mut(DIRECTORY) {
        *directory = directory.trim_matches('/').to_owned();
    }
    context
}

/// Volumes that have a record, and those that a call describes by their attributes: they are as somebody wrote them.
pub(super) struct FlexVolumes {
    pub(super) recorded: Arc<Recorded<Flex>>,
}

impl Volumes for FlexVolumes {
    type Plan = <Recorded<Flex> as Volumes>::Plan;

    fn supports(&self) -> Supports {
        self.recorded.supports()
    }

    fn plan(&self, ctx: &Context, new: &NewVolume) -> Result<Self::Plan> {
        self.recorded.plan(ctx, new)
    }

    fn agrees(&self, volume: &Volume, known: &Parameters, (key, value): (&str, &str)) -> bool {
        known.get(key).or_else(|| volume.context.get(key)).is_some_and(|known| known == value)
    }

    async fn find(&self, ctx: &Context, plan: &Self::Plan) -> Result<Option<Volume>> {
        self.recorded.find(ctx, plan).await
    }

    async fn create(&self, ctx: &Context, plan: Self::Plan) -> Result<Volume> {
        self.recorded.create(ctx, plan).await
    }

    async fn get(&self, ctx: &Context, id: &VolumeId) -> Result<Option<Volume>> {
        if let Some(recorded) = self.recorded.get(ctx, id).await? {
            return Ok(Some(recorded));
        }
        if ctx.volume_context().is_empty() {
            return Ok(None);
        }
        let mut volume = Volume::new(id.clone(), Capacity::ZERO);
        volume.context.clone_from(ctx.volume_context());
        Ok(Some(volume))
    }

    async fn delete(&self, ctx: &Context, id: &VolumeId) -> Result<()> {
        self.recorded.delete(ctx, id).await
    }
}
