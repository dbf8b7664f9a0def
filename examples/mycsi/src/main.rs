// The tutorial's driver: a volume is a directory below a root (where an NFS share is mounted, say), which the
// framework binds into the pod. Settings: MYCSI_ROOT, and those of `Options::from_env`.

use std::{env, fs, io::ErrorKind, path::PathBuf, sync::Arc};

use berth_driver::prelude::*;

struct MyCsi {
    root: PathBuf,
}

/// The parameters of a StorageClass. A key that is not here is refused by its name.
#[derive(serde::Deserialize)]
struct Class {
    /// The NFS server; what it exports has to be mounted below the root already.
    #[serde(default, rename = "server")]
    _server: String,
    /// The directory below the root.
    #[serde(default)]
    share: String,
}

impl Class {
    /// Where a volume is below the root.
    fn path(&self, id: &VolumeId) -> Result<String> {
        let share = self.share.trim_matches('/');
        if share.split('/').any(|part| part == "..") {
            return Err(Error::invalid(format!("parameter \"share\": {share:?} leads out of the root")));
        }
        Ok(format!("{share}/{id}").trim_start_matches('/').to_owned())
    }
}

impl Provision for MyCsi {
    type Class = Class;

    fn supports(&self) -> Supports {
        Supports::filesystem().on_many_nodes()
    }

    async fn create(&self, _: &Context, id: &VolumeId, new: &NewVolume, class: &Class) -> Result<Volume> {
        let path = class.path(id)?;
        fs::create_dir_all(self.root.join(&path))?;
        // A directory has no size of its own: it has the one that is asked for.
        Ok(Volume::new(id.clone(), new.range.choose(Capacity::gibibytes(1))).with_context("path", path))
    }

    async fn delete(&self, _: &Context, id: &VolumeId, class: &Class) -> Result<()> {
        let path = self.root.join(class.path(id)?);
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        // The share's own directories go with the last volume below them; those that are not empty stay.
        let mut parents = path.ancestors().skip(1).take_while(|dir| *dir != self.root);
        while parents.next().is_some_and(|dir| fs::remove_dir(dir).is_ok()) {}
        Ok(())
    }
}

impl Sources for MyCsi {
    async fn source(&self, _: &Context, volume: &NodeVolume) -> Result<Source> {
        let path =
            volume.context.get("path").ok_or_else(|| Error::invalid("volume_context has no \"path\""))?;
        if !self.root.join(path).is_dir() {
            return Err(Error::not_found("volume", &volume.id));
        }
        Ok(Source::below(&self.root, path))
    }
}

fn driver(root: PathBuf, node: NodeId) -> Result<Driver> {
    let backend = Arc::new(MyCsi { root: root.clone() });
    let volumes = Recorded::open(&backend, root.join(".mycsi"))?;
    Ok(Driver::new("mycsi.jtthink.com", "0.1.0")
        .controller(Controller::new(&volumes).listing(&volumes))
        .node(Node::binding(node, &backend)))
}

#[tokio::main]
async fn main() -> Result<()> {
    let root = env::var("MYCSI_ROOT").unwrap_or_else(|_| "/srv/mycsi".to_owned());
    let options = Options::from_env()?;
    driver(root.into(), options.node_id.clone())?.serve(options).await
}
