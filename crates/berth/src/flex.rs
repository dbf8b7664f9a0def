//! `berth flex`: FlexVolume drivers for NFS shares and for directories and images of this machine.
//!
//! ```text
//! <plugin dir>/k8s~nfs/nfs mount DIR JSON     this program, by the name under which it was installed (install.rs)
//! berth flex mount DIR JSON                   the same by hand
//!         │
//!   intercept -> callout::perform -> the direct mounts of berth-backends
//! ```
//!
//! - A call-out is answered by exactly one JSON object on standard output and nothing on standard error, whatever happens: the
//!   kubelet reads both as one. It is recognised before the command line of this program is built, which takes longer than the
//!   call.
//! - What one call-out has to leave for another is a record per target (`record.rs`).
//! - Secrets arrive in the JSON document; neither replies nor records hold them.

mod callout;
mod install;
mod migrate;
mod record;

use std::ffi::{OsStr, OsString};
use std::io::Write as _;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use berth_flex::{ArgumentError, Call, Reply, Status};
use clap::{Args as ClapArgs, Subcommand};
use serde::{Deserialize, Serialize};

use self::callout::Failure;

/// What is not a call-out below `berth flex`.
const COMMANDS: &[&str] = &["install", "uninstall", "migrate", "help"];
/// In the directory of an installed driver: its settings. The kubelet ignores names that begin with a dot.
const SETTINGS: &str = ".berth.json";

/// Run FlexVolume drivers, and change their volumes over to CSI.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Every other word is a call-out, with the arguments that the kubelet gives it: init, getvolumename, attach, \
    waitforattach, isattached, mountdevice, unmountdevice, detach, mount, unmount, expandvolume, expandfs. `--driver local` \
    before it is for the driver local instead of nfs."
)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install this program as a FlexVolume driver in the kubelet's plugin directory
    Install(install::InstallArgs),
    /// Remove an installed FlexVolume driver
    Uninstall(install::UninstallArgs),
    /// Change PersistentVolumes of FlexVolume drivers over to CSI drivers, or back
    Migrate(migrate::Args),
}

/// The storage behind a FlexVolume driver, and the name under which it is installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Driver {
    /// Shares of NFS servers
    Nfs,
    /// Directories and images of this machine
    Local,
}

impl Driver {
    const ALL: [Self; 2] = [Self::Nfs, Self::Local];

    fn name(self) -> &'static str {
        match self {
            Self::Nfs => "nfs",
            Self::Local => "local",
        }
    }

    fn of(name: &OsStr) -> Option<Self> {
        Self::ALL.into_iter().find(|driver| name == driver.name())
    }
}

/// How a driver works; written when it is installed, since call-outs have no flags.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Settings {
    /// Where the records of what is mounted lie. They need not survive a reboot, which no mount does.
    state_dir: PathBuf,
    /// Whether NFS shares are mounted through FUSE; the kernel is asked where this is not set.
    fuse: Option<bool>,
    /// Mount options of NFS volumes that have none.
    default_mount_options: Vec<String>,
    /// The NFS servers that may be mounted; every server if empty.
    allowed_servers: Vec<String>,
    /// Directories below which local volumes may lie.
    allowed_paths: Vec<PathBuf>,
    mount_timeout_seconds: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            state_dir: "/run/berth/flex".into(),
            fuse: None,
            default_mount_options: Vec::new(),
            allowed_servers: Vec::new(),
            allowed_paths: vec!["/var/lib/berth/volumes".into()],
            mount_timeout_seconds: 110,
        }
    }
}

impl Settings {
    /// The settings of the driver whose executable this is; the defaults where it was not installed.
    fn read(executable: &Path) -> Result<Self, Failure> {
        let Some(directory) = executable.parent().filter(|parent| !parent.as_os_str().is_empty()) else {
            return Ok(Self::default());
        };
        let path = directory.join(SETTINGS);
        let text = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            text => text.map_err(|error| Failure(format!("read {}: {error}", path.display())))?,
        };
        serde_json::from_slice(&text).map_err(|error| {
            Failure(format!(
                "{} is not what `berth flex install` writes: {error}; install the driver again",
                path.display()
            ))
        })
    }

    fn mount_timeout(&self) -> Duration {
        Duration::from_secs(self.mount_timeout_seconds)
    }
}

/// Answers a call-out if the command line is one; `None` if it is a command for people.
pub(crate) fn intercept(mut words: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let executable = PathBuf::from(words.next()?);
    let mut words: Vec<OsString> = words.collect();
    let driver = match executable.file_name().and_then(Driver::of) {
        Some(driver) => Ok(driver),
        None if words.first()? == "flex" => {
            words.remove(0);
            driver_in(&mut words)?
        }
        None => return None,
    };
    Some(answer(|| match Call::parse(&words) {
        Err(ArgumentError::UnknownCall(_)) => Ok(Reply::not_supported()),
        Err(error) => Err(Failure(error.to_string())),
        Ok(call) => callout::perform(driver?, call, || Settings::read(&executable)),
    }))
}

/// Takes `--driver NAME` off the words of `berth flex`; `None` if they are no call-out.
fn driver_in(words: &mut Vec<OsString>) -> Option<Result<Driver, Failure>> {
    let first = words.first()?.to_string_lossy().into_owned();
    let name = match first.strip_prefix("--driver") {
        Some("") if words.len() > 1 => words.drain(..2).nth(1)?,
        Some(value) if value.starts_with('=') => {
            words.remove(0);
            value[1..].into()
        }
        _ if COMMANDS.contains(&&*first) || first.starts_with('-') => return None,
        _ => return Some(Ok(Driver::Nfs)),
    };
    let none =
        || Failure(format!("there is no FlexVolume driver {:?}; there are nfs and local", name.display()));
    Some(Driver::of(&name).ok_or_else(none))
}

/// Prints the reply of a call-out, also of one that fails or panics.
fn answer(call: impl FnOnce() -> Result<Reply, Failure>) -> ExitCode {
    // Standard error is read together with standard output, and what a panic says could hold a secret.
    panic::set_hook(Box::new(|_| {}));
    let reply = panic::catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| {
        Err(Failure("the driver panicked, which is a fault of Berth; the call can be repeated".to_owned()))
    });
    let reply = reply.unwrap_or_else(|Failure(message)| Reply::failure(message));
    let text = serde_json::to_string(&reply).expect("a reply is a JSON object");
    // Whoever closed the pipe does not want to read that either.
    let _ = writeln!(std::io::stdout(), "{text}");
    if reply.status == Status::Failure { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs what is not a call-out.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Install(args) => install::install(&args),
        Command::Uninstall(args) => install::uninstall(&args),
        Command::Migrate(args) => migrate::run(args).await,
    }
}
