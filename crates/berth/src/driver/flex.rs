//! `berth driver flex`: any FlexVolume driver as a CSI driver.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use berth_backends::flex::{Config, Flex, csi_name_of, driver_name_of};
use berth_backends::services;
use berth_core::NodeId;
use berth_host::files::write_private;
use berth_host::path::Dir;
use clap::{ArgMatches, Args as ClapArgs, FromArgMatches as _};

use super::{Backend, Opened, Replaced};
use crate::stack::objects::Objects;

/// In the state directory: the path of the executable that was served last.
const PLUGIN: &str = "plugin";

pub(super) const BACKEND: Backend = Backend {
    name: "flex",
    about: "Any FlexVolume driver as a CSI driver: its executable is called",
    separable: true,
    flags: Args::augment_args,
    driver_name: |matches| {
        Args::from_arg_matches(matches).ok().and_then(|args| args.driver_name().ok()).unwrap_or_default()
    },
    open: |matches, mode| Box::pin(async move { open(&Args::from_arg_matches(&matches)?, mode).await }),
    embedded_flags: EmbeddedArgs::augment_args,
    embedded,
    // Whether it attaches is known when it runs, and its own CSIDriver object says it.
    objects: |_| Objects { driver: None, classes: Vec::new(), snapshot_classes: Vec::new() },
    replaced: Replaced::NOTHING,
};

/// Any FlexVolume driver as a CSI driver: its executable is called.
#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "Volumes")]
struct Args {
    /// The driver's executable, in a directory vendor~driver, as in the kubelet's plugin directory
    #[arg(long, value_name = "PATH")]
    plugin: PathBuf,

    /// The id of this node, which is the name of its Node object [default: the host's name]
    #[arg(long, alias = "nodeid", env = "NODE_ID", value_name = "NAME")]
    node_id: Option<NodeId>,

    /// The driver's name, as it stands in PersistentVolumes [default: DRIVER.VENDOR.flex.berth.dev]
    #[arg(long, alias = "drivername", value_name = "NAME")]
    driver_name: Option<String>,

    /// Where records of what is mounted and of provisioned volumes are kept
    #[arg(long, default_value = "/var/lib/berth/flex", value_name = "DIR")]
    state_dir: PathBuf,

    /// How long a call of the executable may take; then it is killed with all its process group
    #[arg(long, default_value_t = 100, value_name = "SECONDS")]
    call_timeout_seconds: u64,
}

/// How a FlexVolume driver runs in `berth up`.
#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "The FlexVolume driver")]
struct EmbeddedArgs {
    /// The FlexVolume driver's executable, in a directory vendor~driver
    #[arg(long = "flex-plugin", value_name = "PATH")]
    flex_plugin: Option<PathBuf>,
}

fn embedded(up: &ArgMatches, directory: &Path, node: &str) -> Vec<OsString> {
    let mut words =
        vec!["--state-dir".into(), directory.as_os_str().to_owned(), "--node-id".into(), node.into()];
    // `berth down` takes volumes away without the flags of `berth up`.
    let noted = || std::fs::read_to_string(directory.join(PLUGIN)).ok().map(PathBuf::from);
    if let Some(plugin) = up.get_one::<PathBuf>("flex_plugin").cloned().or_else(noted) {
        words.extend(["--plugin".into(), plugin.into_os_string()]);
    }
    words
}

impl Args {
    fn driver_name(&self) -> anyhow::Result<String> {
        if let Some(name) = &self.driver_name {
            return Ok(name.clone());
        }
        let name = csi_name_of(&driver_name_of(&self.plugin).context("--plugin")?);
        anyhow::ensure!(
            name.len() <= 63,
            "the name {name:?} is too long for a CSI driver; give another with --driver-name"
        );
        Ok(name)
    }
}

async fn open(args: &Args, mode: services::Mode) -> anyhow::Result<Opened> {
    let name = args.driver_name()?;
    let node = match &args.node_id {
        Some(node) => node.clone(),
        None => super::node_id()?,
    };
    let state_dir = std::path::absolute(&args.state_dir)?;
    let plugin = std::path::absolute(&args.plugin)?;
    Dir::ensure(&state_dir, 0o700)?;
    let noted = state_dir.join(PLUGIN);
    write_private(&noted, plugin.as_os_str().as_encoded_bytes())
        .with_context(|| format!("write {}", noted.display()))?;
    let config = Config {
        plugin,
        node,
        state_dir: state_dir.clone(),
        call_timeout: Duration::from_secs(args.call_timeout_seconds),
    };
    let flex = Flex::start(config, mode).await?;
    let driver = flex.driver(&name, env!("CARGO_PKG_VERSION"), mode)?;
    let how = if flex.attaches() { "attaches volumes" } else { "mounts volumes without attaching them" };
    Ok(Opened {
        driver: driver.open(services::Config::new(&state_dir))?,
        remark: format!("the FlexVolume driver {} {how}", flex.name()),
        drain: Box::new(|_| Box::pin(async {})),
    })
}
