//! What a call-out does.
//!
//! Neither driver attaches anything: a share is reached from every node, and a directory is where it is. So `mount` and
//! `unmount` do the work, `expandfs` grows images, and what belongs to attachment is answered `Not supported`, which has the
//! caller do without.

use std::collections::BTreeMap;
use std::path::Path;

use berth_backends::{
    Access, AccessMode, Capacity, Context, NodeVolume, Secrets, VolumeCapability, VolumeId,
    local::DirectVolumes,
    nfs::{self, AllowedServers, DirectMounts, MountMode},
};
use berth_core::error_chain;
use berth_core::names::{FLEX_FS_TYPE, FLEX_READ_WRITE, FLEX_VOLUME_NAME};
use berth_flex::{Call, Capabilities, Options, Reply};

use super::record::{Locked, Phase, Record};
use super::{Driver, Settings};

/// Why a call-out failed, for the reply's `message`.
#[derive(Debug)]
pub(super) struct Failure(pub(super) String);

impl From<berth_backends::Error> for Failure {
    fn from(error: berth_backends::Error) -> Self {
        match error {
            berth_backends::Error::Host(error) => error.into(),
            other => Self(error_chain(&other)),
        }
    }
}

impl From<berth_host::Error> for Failure {
    fn from(error: berth_host::Error) -> Self {
        Self(error.sentence())
    }
}

/// Answers a call-out. The settings are read only where they matter.
pub(super) fn perform(
    driver: Driver,
    call: Call,
    settings: impl FnOnce() -> Result<Settings, Failure>,
) -> Result<Reply, Failure> {
    match call {
        Call::Init => {
            let capabilities = Capabilities {
                attach: false,
                // A label would be stored by the server, for all its clients.
                selinux_relabel: driver == Driver::Local,
                supports_metrics: true,
                ..Capabilities::default()
            };
            Ok(Reply { capabilities: Some(capabilities), ..Reply::success() })
        }
        Call::Mount { directory, options } => mount(driver, &settings()?, &directory, &options),
        Call::Unmount { directory } => unmount(driver, &settings()?, &directory),
        Call::ExpandFs { options, directory, new_size, .. } => {
            expand(driver, &settings()?, &directory, &options, new_size)
        }
        // Only the node that has an image mounted can grow it, and a share has no size of its own.
        Call::ExpandVolume { .. } => Ok(Reply::success()),
        Call::GetVolumeName { .. }
        | Call::Attach { .. }
        | Call::Detach { .. }
        | Call::WaitForAttach { .. }
        | Call::IsAttached { .. }
        | Call::MountDevice { .. }
        | Call::UnmountDevice { .. } => Ok(Reply::not_supported()),
    }
}

fn mount(driver: Driver, settings: &Settings, target: &Path, options: &Options) -> Result<Reply, Failure> {
    let (ctx, volume) = read(driver, options)?;
    let locked = Locked::open(&settings.state_dir, driver, target)?;
    let record = Record {
        target: target.to_owned(),
        phase: Phase::Mounted,
        options: volume.context.clone(),
        read_only: volume.read_only,
    };
    let storage = Storage::open(driver, settings)?;
    let before = locked.read();
    // What a killed call left half done is taken away before it is done again.
    if before.as_ref().is_some_and(|before| before.phase == Phase::Mounting) {
        storage.unmount(target)?;
    }
    std::fs::create_dir_all(target)
        .map_err(|error| Failure(format!("make {}: {error}", target.display())))?;
    let is_known = before.is_some_and(|before| before == record);
    if !is_known {
        locked.write(&Record { phase: Phase::Mounting, ..record.clone() })?;
    }
    if let Err(failure) = storage.mount(&ctx, &volume, target) {
        // The caller makes no unmount call for a mount that failed. What cannot be undone keeps its record.
        if storage.unmount(target).is_ok() {
            locked.remove()?;
        }
        return Err(failure);
    }
    if !is_known {
        locked.write(&record)?;
    }
    Ok(Reply::success())
}

fn unmount(driver: Driver, settings: &Settings, target: &Path) -> Result<Reply, Failure> {
    let locked = Locked::open(&settings.state_dir, driver, target)?;
    Storage::open(driver, settings)?.unmount(target)?;
    locked.remove()?;
    Ok(Reply::success())
}

fn expand(
    driver: Driver,
    settings: &Settings,
    target: &Path,
    options: &Options,
    size: u64,
) -> Result<Reply, Failure> {
    // A share has no size of its own.
    let Storage::Local(volumes) = Storage::open(driver, settings)? else { return Ok(Reply::success()) };
    let (_, mut volume) = read(driver, options)?;
    let locked = Locked::open(&settings.state_dir, driver, target)?;
    // After a restart the kubelet knows no options, and the record does.
    if volume.context.is_empty()
        && let Some(record) = locked.read()
    {
        volume.context = record.options;
    }
    volumes.grow(&volume, target, Capacity::new(size))?;
    Ok(Reply::success())
}

/// The backend of a driver.
enum Storage {
    Nfs(DirectMounts, tokio::runtime::Runtime),
    Local(DirectVolumes),
}

impl Storage {
    fn open(driver: Driver, settings: &Settings) -> Result<Self, Failure> {
        let dir = settings.state_dir.join(driver.name()).join("mounts");
        if driver == Driver::Local {
            return Ok(Self::Local(DirectVolumes { roots: settings.allowed_paths.clone(), dir }));
        }
        let node = "flexvolume".parse().expect("the word is the id of a node");
        let mut config = nfs::Config::new(dir, node);
        let fuse = settings.fuse.unwrap_or_else(|| !berth_host::remote::kernel_has("nfs"));
        config.mount_mode = if fuse { MountMode::Fuse } else { MountMode::Kernel };
        config.mount_options.clone_from(&settings.default_mount_options);
        config.allowed_servers = AllowedServers::parse(&settings.allowed_servers)?;
        config.mount_timeout = settings.mount_timeout();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Failure(format!("start a runtime: {error}")))?;
        Ok(Self::Nfs(DirectMounts::new(&config), runtime))
    }

    fn mount(&self, ctx: &Context, volume: &NodeVolume, target: &Path) -> Result<(), Failure> {
        match self {
            Self::Nfs(mounts, runtime) => runtime.block_on(mounts.mount(ctx, volume, target))?,
            Self::Local(volumes) => volumes.mount(volume, target)?,
        }
        Ok(())
    }

    fn unmount(&self, target: &Path) -> Result<(), Failure> {
        match self {
            Self::Nfs(mounts, runtime) => runtime.block_on(mounts.unmount(target))?,
            Self::Local(volumes) => volumes.unmount(target)?,
        }
        Ok(())
    }
}

/// Reads the JSON document as the backends take it.
fn read(driver: Driver, options: &Options) -> Result<(Context, NodeVolume), Failure> {
    let context: BTreeMap<String, String> =
        options.own().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let mut secrets = BTreeMap::new();
    for (key, value) in options.secrets() {
        let text = value.and_then(|bytes| String::from_utf8(bytes).ok());
        let text = text.ok_or_else(|| Failure(format!("the secret's {key:?} is not text in base64")))?;
        secrets.insert(key.to_owned(), text);
    }
    let fs_type = options.get(FLEX_FS_TYPE).unwrap_or_default().to_owned();
    if driver == Driver::Nfs {
        check_nfs(&context, &fs_type)?;
    }
    let read_only = options.get(FLEX_READ_WRITE) == Some("ro");
    let name = options.get(FLEX_VOLUME_NAME).filter(|name| !name.is_empty()).unwrap_or("volume");
    let id: VolumeId = name.parse().map_err(|error| Failure(format!("the volume's name: {error}")))?;
    let volume = NodeVolume {
        id,
        capability: VolumeCapability {
            access: Access::Mount { fs_type, flags: Vec::new(), group: None },
            mode: AccessMode::MultiNodeMultiWriter,
        },
        read_only,
        context,
        publish_context: BTreeMap::new(),
        staging: None,
    };
    Ok((Context::new(None, Secrets::from(secrets), &BTreeMap::new()), volume))
}

/// Refuses options of an NFS volume that nobody would read.
fn check_nfs(options: &BTreeMap<String, String>, fs_type: &str) -> Result<(), Failure> {
    const KNOWN: [&str; 5] = ["server", "share", "subDir", "mountOptions", "mountPermissions"];
    if let Some(key) = options.keys().find(|key| !KNOWN.iter().any(|known| known.eq_ignore_ascii_case(key))) {
        return Err(Failure(format!("option {key:?} is none of {}", KNOWN.join(", "))));
    }
    for needed in &KNOWN[..2] {
        let given = options.iter().find(|(key, _)| needed.eq_ignore_ascii_case(key));
        if given.is_none_or(|(_, value)| value.is_empty()) {
            return Err(Failure(format!(
                "option {needed:?} is missing; give the volume the options server and share"
            )));
        }
    }
    if !matches!(fs_type, "" | "nfs" | "nfs4") {
        return Err(Failure(format!("fsType {fs_type:?} is not nfs; leave it out")));
    }
    Ok(())
}
