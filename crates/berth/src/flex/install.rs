//! `berth flex install` and `uninstall`: this program in the kubelet's plugin directory, whole or not at all.
//!
//! The kubelet runs `init` whenever it sees a change below the plugin directory, except below names that begin with a dot. So
//! a new driver's directory is filled under such a name and then renamed, and a newer executable is written under such a name
//! and then renamed over the older one.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use berth_flex::{DriverName, KUBELET_PLUGIN_DIRECTORY};
use clap::Args as ClapArgs;

use super::{Driver, SETTINGS, Settings, record};

/// Which driver, and where.
#[derive(Debug, ClapArgs)]
struct Which {
    /// The part of the driver's name before the slash
    #[arg(long, default_value = "k8s", value_name = "VENDOR")]
    vendor: String,

    /// The driver, whose name is the part behind the slash
    #[arg(long, value_enum, default_value_t = Driver::Nfs)]
    driver: Driver,

    /// The kubelet's plugin directory (its --volume-plugin-dir), as seen here
    #[arg(long, default_value = KUBELET_PLUGIN_DIRECTORY, value_name = "DIR")]
    plugin_dir: PathBuf,
}

impl Which {
    fn name(&self) -> anyhow::Result<DriverName> {
        format!("{}/{}", self.vendor, self.driver.name()).parse().context("--vendor")
    }
}

/// Install this program as a FlexVolume driver in the kubelet's plugin directory.
#[derive(Debug, ClapArgs)]
pub(super) struct InstallArgs {
    #[command(flatten)]
    which: Which,

    /// Where the driver notes what it mounted, as the kubelet sees it; it need not survive a reboot
    #[arg(long, default_value = "/run/berth/flex", value_name = "DIR")]
    state_dir: PathBuf,

    /// What mounts NFS shares [default: the kernel if it has an NFS client, else FUSE]
    #[arg(long, value_enum)]
    mount_mode: Option<crate::driver::nfs::MountModeArg>,

    /// Mount options for NFS volumes that give none, such as port=20049,vers=4.1
    #[arg(long, value_name = "OPTIONS")]
    default_mount_options: Option<String>,

    /// NFS servers that may be mounted: names (nfs.example.com, *.example.com), addresses and networks (10.0.0.0/8),
    /// separated by commas [default: every server]
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    allowed_servers: Vec<String>,

    /// A directory below which volumes of the driver local may lie; may be given several times
    #[arg(long = "allowed-path", default_value = "/var/lib/berth/volumes", value_name = "DIR")]
    allowed_paths: Vec<PathBuf>,

    /// How long mounting an NFS share may take
    #[arg(long, default_value_t = 110, value_name = "SECONDS")]
    mount_timeout_seconds: u64,
}

/// Remove an installed FlexVolume driver.
#[derive(Debug, ClapArgs)]
pub(super) struct UninstallArgs {
    #[command(flatten)]
    which: Which,

    /// Also if its volumes are still mounted; the kubelet cannot unmount them then
    #[arg(long)]
    force: bool,
}

pub(super) fn install(args: &InstallArgs) -> anyhow::Result<()> {
    let name = args.which.name()?;
    let settings = args.settings()?;
    let plugins = &args.which.plugin_dir;
    fs::create_dir_all(plugins)
        .with_context(|| format!("make the plugin directory {}", plugins.display()))?;
    let directory = plugins.join(name.directory());
    let executable = name.path_below(plugins);
    let settings = serde_json::to_vec_pretty(&settings).context("write the settings")?;
    if directory.is_dir() {
        fill(&directory, &name, &settings)?;
    } else {
        let hidden = plugins.join(format!(".{}.{}", name.directory(), std::process::id()));
        let made = DirBuilder::new().mode(0o755).create(&hidden).map_err(Into::into);
        let made = made.and_then(|()| fill(&hidden, &name, &settings));
        let made = made.and_then(|()| Ok(fs::rename(&hidden, &directory)?));
        if let Err(error) = made {
            let _ = fs::remove_dir_all(&hidden);
            return Err(error).with_context(|| format!("make {}", directory.display()));
        }
        sync(plugins)?;
    }
    println!("Installed the FlexVolume driver {name} as {}.", executable.display());
    Ok(())
}

impl InstallArgs {
    fn settings(&self) -> anyhow::Result<Settings> {
        berth_backends::nfs::AllowedServers::parse(&self.allowed_servers).context("--allowed-servers")?;
        for path in self.allowed_paths.iter().chain([&self.state_dir]) {
            anyhow::ensure!(path.is_absolute(), "{} is not an absolute path", path.display());
        }
        Ok(Settings {
            state_dir: self.state_dir.clone(),
            fuse: Some(
                self.mount_mode.unwrap_or_else(crate::driver::nfs::MountModeArg::of_this_kernel).is_fuse(),
            ),
            default_mount_options: self.default_mount_options.iter().cloned().collect(),
            allowed_servers: self.allowed_servers.clone(),
            allowed_paths: self.allowed_paths.clone(),
            mount_timeout_seconds: self.mount_timeout_seconds,
        })
    }
}

/// Puts settings and executable into a directory, the executable last.
fn fill(directory: &Path, name: &DriverName, settings: &[u8]) -> anyhow::Result<()> {
    let path = directory.join(SETTINGS);
    berth_host::files::write_private(&path, settings).with_context(|| format!("write {}", path.display()))?;
    let (hidden, executable) =
        (directory.join(format!(".{}.new", name.executable())), directory.join(name.executable()));
    copy_program(&hidden).with_context(|| format!("copy this program to {}", hidden.display()))?;
    fs::rename(&hidden, &executable).with_context(|| format!("make {}", executable.display()))?;
    sync(directory)
}

/// Copies this program, and waits until it is on the disk.
fn copy_program(to: &Path) -> io::Result<()> {
    // What a killed installation left may be running, and cannot be written then.
    match fs::remove_file(to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut program = File::open("/proc/self/exe")?;
    let mut copy = OpenOptions::new().write(true).create_new(true).mode(0o755).open(to)?;
    io::copy(&mut program, &mut copy)?;
    copy.sync_all()
}

fn sync(directory: &Path) -> anyhow::Result<()> {
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.with_context(|| format!("flush {}", directory.display()))
}

pub(super) fn uninstall(args: &UninstallArgs) -> anyhow::Result<()> {
    let name = args.which.name()?;
    let executable = name.path_below(&args.which.plugin_dir);
    let Ok(settings) = Settings::read(&executable) else {
        bail!("{} is damaged; install the driver again, or remove its directory", executable.display());
    };
    let mounted: Vec<String> = record::targets(&settings.state_dir, args.which.driver)
        .into_iter()
        .filter(|target| berth_host::remote::is_mounted(target).unwrap_or(true))
        .map(|target| target.display().to_string())
        .collect();
    if !mounted.is_empty() && !args.force {
        bail!(
            "volumes of {name} are still mounted, and nobody could unmount them without the driver: {}; stop their pods \
             first, or give --force",
            mounted.join(", ")
        );
    }
    let directory = args.which.plugin_dir.join(name.directory());
    for file in [executable.clone(), directory.join(SETTINGS)] {
        match fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("remove {}", file.display()));
            }
            _ => {}
        }
    }
    match fs::remove_dir(&directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("remove {}", directory.display()));
        }
        _ => {}
    }
    println!("Removed the FlexVolume driver {name} from {}.", args.which.plugin_dir.display());
    Ok(())
}
