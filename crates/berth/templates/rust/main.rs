//! A CSI driver whose volumes are directories below ROOT, bound into pods. `berth-driver` does the rest: the protocol, errors, locks,
//! a record of each volume, mounts, and recovery after a crash. Other capabilities are other traits: see framework/crates/berth-driver/src/lib.rs.

use std::{env, fs, io::ErrorKind, path::PathBuf, sync::Arc};

use berth_driver::{CapacityRange, Expanded, ProvisionExpansion, prelude::*};

const NAME: &str = "@DRIVER@";

struct Directories {
    root: PathBuf,
}

/// The parameters of a StorageClass. A key that is not here is refused by its name.
#[derive(serde::Deserialize)]
struct Class {
    /// The permissions of a volume's directory, in octal.
    #[serde(default = "default_mode")]
    mode: String,
}

fn default_mode() -> String {
    "0777".to_owned()
}

impl Class {
    fn permissions(&self) -> Result<fs::Permissions> {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = u32::from_str_radix(&self.mode, 8).ok().filter(|mode| *mode <= 0o7777);
        let mode = mode.ok_or_else(|| Error::invalid(format!("parameter \"mode\": {:?} is no mode", self.mode)))?;
        Ok(fs::Permissions::from_mode(mode))
    }
}

impl Provision for Directories {
    type Class = Class;

    fn supports(&self) -> Supports {
        Supports::filesystem().on_many_nodes()
    }

    /// Answers CreateVolume. It may find the directory of an attempt that was cut off.
    async fn create(&self, _: &Context, id: &VolumeId, new: &NewVolume, class: &Class) -> Result<Volume> {
        let permissions = class.permissions()?;
        let path = self.root.join(id.as_str());
        fs::create_dir_all(&path)?;
        fs::set_permissions(&path, permissions)?;
        // A directory has no size of its own: it has the one that is asked for.
        Ok(Volume::new(id.clone(), new.range.choose(Capacity::gibibytes(1))))
    }

    /// Answers DeleteVolume, and takes back a creation that failed.
    async fn delete(&self, _: &Context, id: &VolumeId, _: &Class) -> Result<()> {
        match fs::remove_dir_all(self.root.join(id.as_str())) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}

impl ProvisionExpansion for Directories {
    /// Answers ControllerExpandVolume; the framework records the size.
    async fn grow(&self, _: &Context, volume: &Volume, range: CapacityRange) -> Result<Expanded> {
        let capacity = range.choose(volume.capacity).max(volume.capacity);
        Ok(Expanded { capacity, node_expansion_required: false })
    }
}

impl Sources for Directories {
    /// Says what NodePublishVolume binds at a pod's path.
    async fn source(&self, _: &Context, volume: &NodeVolume) -> Result<Source> {
        if !self.root.join(volume.id.as_str()).is_dir() {
            return Err(Error::not_found("volume", &volume.id));
        }
        Ok(Source::below(&self.root, volume.id.as_str()))
    }
}

/// What the driver announces follows from these lines.
fn driver(root: PathBuf, node: NodeId) -> Result<Driver> {
    fs::create_dir_all(&root)?;
    let backend = Arc::new(Directories { root: root.clone() });
    let volumes = Recorded::open(&backend, root.join(".records"))?;
    Ok(Driver::new(NAME, env!("CARGO_PKG_VERSION"))
        .controller(Controller::new(&volumes).listing(&volumes).expansion(&volumes))
        .node(Node::binding(node, &backend)))
}

/// Settings: ROOT, and those of `Options::from_env`: CSI_ENDPOINT, NODE_ID, STATE_DIR, REGISTRATION_DIR.
#[tokio::main]
async fn main() -> Result<()> {
    let root = env::var("ROOT").unwrap_or_else(|_| "/var/lib/@NAME@/volumes".to_owned());
    let options = Options::from_env()?;
    driver(root.into(), options.node_id.clone())?.serve(options).await
}
