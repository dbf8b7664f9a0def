//! `berth nfs serve` and `berth up --nfs-export`: an NFS server for trying and testing, with nothing installed.

use std::ffi::OsString;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use berth_core::Network;
use berth_nfsd::{Handles, Options, Server};
use clap::{ArgMatches, Args as ClapArgs, Subcommand, ValueEnum};
use k8s_openapi::Resource as _;
use k8s_openapi::api::storage::v1::StorageClass;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::launch::stop_on_signal;
use crate::{logging, machine};

/// The class of claims on the server of `berth up`.
const CLASS: &str = "berth-nfs";
/// What the directory is called by clients that do not know its path.
const NAME: &str = "/export";
/// Where the server of `berth up` keeps its key, in the data directory.
const STATE: &str = "nfs-server";

/// An NFS server for trying and testing.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a directory by NFS version 3, for trying and testing
    Serve(Serve),
}

#[derive(Debug, ClapArgs)]
struct Serve {
    /// The directory to serve
    #[arg(long, value_name = "DIR")]
    export: PathBuf,

    /// What clients may call the directory, beside its own path; may be given several times
    #[arg(long = "as", default_value = NAME, value_name = "PATH")]
    names: Vec<PathBuf>,

    /// Where to listen, for NFS and MOUNT alike; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:2049", value_name = "ADDRESS")]
    listen: SocketAddr,

    /// An address or network that may connect, beside this machine; may be given several times, and must be to listen on
    /// other addresses than loopback
    #[arg(long, value_name = "CIDR")]
    allow: Vec<Network>,

    /// Where the key that signs file handles is kept, so that they are good after a restart
    #[arg(long, default_value = "/var/lib/berth/nfs-server", value_name = "DIR")]
    state_dir: PathBuf,

    /// Do what root asks for as nobody (65534), as the kernel's server does unless it is told no_root_squash
    #[arg(long)]
    root_squash: bool,

    /// Serve clients on ports from 1024, too: any user of a machine that may connect can then pass for any other, root included
    #[arg(long)]
    unprivileged_ports: bool,

    /// Answer before changes are on the disk: faster, and a power cut may lose what was confirmed
    #[arg(long = "async")]
    asynchronous: bool,

    /// How files are found by their handles [default: kernel, where the filesystem has handles and the process may open them]
    #[arg(long, value_enum, value_name = "WAY")]
    handles: Option<HandlesArg>,

    #[command(flatten)]
    logging: logging::Logging,
}

/// A [`Handles`] on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum HandlesArg {
    /// By the kernel's file handles
    Kernel,
    /// By number: where files are is remembered, and searched for once after a restart
    Search,
}

impl From<HandlesArg> for Handles {
    fn from(handles: HandlesArg) -> Self {
        match handles {
            HandlesArg::Kernel => Self::Kernel,
            HandlesArg::Search => Self::Search,
        }
    }
}

/// The NFS server of `berth up`.
#[derive(Debug, Clone, ClapArgs)]
#[command(next_help_heading = "An NFS server to try things on")]
pub(crate) struct ServerArgs {
    /// Serve this directory by NFS on this machine, run the NFS driver, and create the class berth-nfs for it
    #[arg(id = "nfs_export", long = "nfs-export", value_name = "DIR")]
    export: Option<PathBuf>,

    /// What NFS volumes may call the directory, beside its own path; may be given several times
    #[arg(id = "nfs_export_as", long = "nfs-export-as", default_value = NAME, requires = "nfs_export", value_name = "PATH")]
    names: Vec<PathBuf>,

    /// Where the NFS server listens, on loopback
    #[arg(
        id = "nfs_listen",
        long = "nfs-listen",
        default_value = "127.0.0.1:2049",
        value_parser = loopback,
        requires = "nfs_export",
        value_name = "ADDRESS"
    )]
    listen: SocketAddr,
}

/// Reads where the server of `berth up` listens: nodes have to know the port before it does.
fn loopback(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text.parse().map_err(|_| "not an address such as 127.0.0.1:2049".to_owned())?;
    match (address.ip().is_loopback(), address.port()) {
        (true, 1..) => Ok(address),
        (true, 0) => Err("give a port; 0 is none".to_owned()),
        (false, _) => Err("not on loopback; `berth nfs serve` serves other machines".to_owned()),
    }
}

impl ServerArgs {
    /// The flags of a machine that runs no NFS server.
    pub(crate) fn off() -> Self {
        Self { export: None, names: Vec::new(), listen: ([127, 0, 0, 1], 0).into() }
    }

    /// Whether there is to be a server.
    pub(crate) fn is_on(&self) -> bool {
        self.export.is_some()
    }

    /// The mount options by which the server is reached.
    pub(crate) fn mount_options(&self) -> Option<String> {
        self.is_on().then(|| mount_options(self.listen))
    }

    /// The class whose volumes are directories of the server's.
    pub(crate) fn class(&self, driver: &str) -> Option<Value> {
        self.export.as_ref()?;
        let share = self.names.first().map_or(Path::new(NAME), PathBuf::as_path);
        Some(json!({
            "apiVersion": StorageClass::API_VERSION,
            "kind": StorageClass::KIND,
            "metadata": { "name": CLASS },
            "provisioner": driver,
            "parameters": { "server": self.listen.ip().to_string(), "share": share },
            "allowVolumeExpansion": true,
        }))
    }

    /// Starts the server, if there is to be one: it goes on until it is stopped, which is after everybody who uses it.
    pub(crate) async fn start(
        &self,
        data_dir: &Path,
        progress: impl Fn(&str),
    ) -> anyhow::Result<Option<Started>> {
        let Some(directory) = &self.export else { return Ok(None) };
        let server = Server::start(Options {
            directory: directory.clone(),
            names: self.names.clone(),
            listen: self.listen,
            allow: Vec::new(),
            state_directory: data_dir.join(STATE),
            squash_root: false,
            // Without root nobody has a port that only root may use.
            allow_unprivileged_ports: berth_host::namespace::is_restricted(),
            handles: None,
            is_asynchronous: false,
        });
        let server = server.await.context("start the NFS server (--nfs-export)")?;
        let (stop, address) = (CancellationToken::new(), server.address());
        progress(&format!(
            "NFS server on {address}: {} is {}, for trying and testing",
            server.names().last().map_or(String::new(), |name| name.display().to_string()),
            directory.display()
        ));
        let task = tokio::spawn(server.run(stop.clone()));
        Ok(Some(Started { stop, task }))
    }
}

/// The NFS server of `berth up`, running.
pub(crate) struct Started {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Started {
    /// Stops the server; calls under way are done and not answered.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        let _ = self.task.await;
    }
}

/// The flag by which the NFS driver of `berth up` reaches the server there, unless it is given mount options of one's own.
pub(crate) fn driver_flag(up: &ArgMatches) -> Option<OsString> {
    up.get_one::<PathBuf>("nfs_export")?;
    let address = up.get_one::<SocketAddr>("nfs_listen")?;
    Some(format!("--default-mount-options={}", mount_options(*address)).into())
}

/// How clients reach a server that has neither a portmapper nor locks.
fn mount_options(address: SocketAddr) -> String {
    let port = address.port();
    format!("vers=3,port={port},mountport={port},nolock")
}

/// Serves until SIGTERM or SIGINT.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let Command::Serve(args) = args.command;
    machine::require_root("nfs serve", "acts as the users of its clients")?;
    logging::start(&args.logging);
    let stop = stop_on_signal()?;
    let (is_squashed, is_open) = (args.root_squash, args.unprivileged_ports);
    let server = Server::start(Options {
        directory: args.export,
        names: args.names,
        listen: args.listen,
        allow: args.allow,
        state_directory: args.state_dir,
        squash_root: args.root_squash,
        allow_unprivileged_ports: args.unprivileged_ports,
        handles: args.handles.map(Into::into),
        is_asynchronous: args.asynchronous,
    })
    .await?;
    print!("{}", greeting(&server, is_squashed, is_open));
    std::io::stdout().flush()?;
    server.run(stop).await;
    Ok(())
}

/// What is served, how it is mounted, and what to know about it.
fn greeting(server: &Server, is_squashed: bool, is_open: bool) -> String {
    let address = server.address();
    let shown = server.names().iter().map(|name| name.display().to_string()).collect::<Vec<_>>();
    let host = if address.ip().is_unspecified() { "SERVER".to_owned() } else { address.ip().to_string() };
    let mut text = format!(
        "NFS server for trying and testing, not for production: {} on {address}, version 3, without locks.\n\
         Mount it as\n  mount -t nfs -o {},proto=tcp,mountproto=tcp {host}:{} /mnt\n",
        shown[0],
        mount_options(address),
        shown.last().map_or("/", String::as_str),
    );
    if server.handles() == Handles::Search {
        text += "Files are found by search: the filesystem has no file handles, or this process may not open them.\n";
    }
    if !is_squashed {
        text += "Root of a client is root here (--root-squash changes that).\n";
    }
    if is_open {
        text += "Clients need no port of root's: any user who can connect can pass for any other.\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_of_up_is_on_loopback_and_on_a_port_that_is_known() {
        assert!(loopback("127.0.0.1:2049").is_ok() && loopback("[::1]:2049").is_ok());
        for bad in ["127.0.0.1:0", "0.0.0.0:2049", "192.0.2.1:2049", "2049", "localhost:2049"] {
            assert!(loopback(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn only_an_export_has_a_class_and_options() {
        assert!(ServerArgs::off().class("nfs").is_none() && ServerArgs::off().mount_options().is_none());
        let on = ServerArgs {
            export: Some("/srv".into()),
            names: vec!["/home/nfsdata".into()],
            listen: ([127, 0, 0, 1], 12049).into(),
        };
        assert_eq!(on.mount_options().unwrap(), "vers=3,port=12049,mountport=12049,nolock");
        let class = on.class("mycsi.example.com").unwrap();
        assert_eq!(class["parameters"], json!({ "server": "127.0.0.1", "share": "/home/nfsdata" }));
    }
}
