//! `berth cloud`: a twin of a cloud provider's block storage on loopback, to run and test drivers on without an account.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use berth_cloud::{Delays, InstanceOptions, Options, Provider, Quotas, RateLimit, Twin};
use clap::{Args as ClapArgs, Subcommand};

use crate::launch::stop_on_signal;
use crate::{logging, machine};

/// A cloud provider's API and metadata service on loopback; attached disks are loop devices of this machine.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(subcommand)]
    provider: ProviderArgs,
}

/// Whose API is served.
#[derive(Debug, Subcommand)]
enum ProviderArgs {
    /// DigitalOcean: volumes, snapshots, droplets and tags of its API, version 2
    Digitalocean(DigitalOcean),
    /// Alibaba Cloud: disks, snapshots and instances of its ECS API, version 2014-05-26
    Aliyun(Aliyun),
}

#[derive(Debug, ClapArgs)]
struct DigitalOcean {
    /// The bearer token that is accepted
    #[arg(long, env = "DIGITALOCEAN_ACCESS_TOKEN", default_value = DIGITALOCEAN_TOKEN, hide_env_values = true)]
    token: String,

    /// The region of the account
    #[arg(long, default_value = DIGITALOCEAN_REGION)]
    region: String,

    /// The id of a droplet of the account; may be given several times
    #[arg(long = "instance", default_values_t = [DIGITALOCEAN_INSTANCE.to_owned()], value_name = "ID")]
    instances: Vec<String>,

    /// How many volumes a droplet takes
    #[arg(long, default_value_t = 15, value_name = "N")]
    attach_limit: u64,

    /// How many calls are taken: N/s, N/m, N/h, several of these, or none
    #[arg(long, default_value = "250/m,5000/h", value_name = "LIMIT")]
    rate_limit: RateLimit,

    #[command(flatten)]
    common: Common,
}

#[derive(Debug, ClapArgs)]
struct Aliyun {
    /// The id of the access key that is accepted
    #[arg(long, env = "ALIBABA_CLOUD_ACCESS_KEY_ID", default_value = ALIYUN_KEY_ID)]
    access_key_id: String,

    /// The secret by which requests are signed
    #[arg(
        long,
        env = "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
        default_value = ALIYUN_KEY_SECRET,
        hide_env_values = true
    )]
    access_key_secret: String,

    /// The region of the account
    #[arg(long, default_value = ALIYUN_REGION)]
    region: String,

    /// The id of an instance of the account; may be given several times
    #[arg(long = "instance", default_values_t = [ALIYUN_INSTANCE.to_owned()], value_name = "ID")]
    instances: Vec<String>,

    /// Names of devices: virtio-SERIAL, or nvme-Alibaba_Cloud_Elastic_Block_Storage_SERIAL
    #[arg(long, default_value = "virtio", value_parser = ["virtio", "nvme"])]
    device_names: String,

    /// How many calls of one action are taken: N/s, N/m, N/h, several of these, or none
    #[arg(long, default_value = "1000/m", value_name = "LIMIT")]
    rate_limit: RateLimit,

    #[command(flatten)]
    common: Common,
}

/// The flags that every provider has.
#[derive(Debug, ClapArgs)]
struct Common {
    /// Where to listen, on loopback; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDRESS")]
    listen: SocketAddr,

    /// Where disks, snapshots and records are kept
    #[arg(long, default_value = "/var/lib/berth/cloud", value_name = "DIR")]
    data_dir: PathBuf,

    /// Where links to the devices of attached disks appear, in a directory for each instance [default: devices in the data
    /// directory]
    #[arg(long, value_name = "DIR")]
    devices: Option<PathBuf>,

    /// How many disks the account may have
    #[arg(long, default_value_t = 100, value_name = "N")]
    volume_limit: u64,

    /// How many GiB the account's disks may have together
    #[arg(long, default_value_t = 102_400, value_name = "GIB")]
    capacity: u64,

    /// How long something takes, such as attach=2s: create, attach, detach, resize, snapshot, modify; device (until a device
    /// appears), listed (until lists show what was created), busy (how long a detach waits for a device in use)
    #[arg(long = "delay", value_name = "WHAT=DURATION")]
    delays: Vec<String>,

    /// What goes wrong, such as volumes.create=after:500: CALL=EFFECT, with ,after=N and ,times=N if wanted; effects are before:STATUS,
    /// after:STATUS, drop-before, drop-after, throttle, slow:DURATION, errored, no-device, late-device:DURATION, other-name
    #[arg(long = "fault", value_name = "FAULT")]
    faults: Vec<String>,

    /// Detach all devices and remove the data directory, instead of serving
    #[arg(long)]
    purge: bool,

    #[command(flatten)]
    logging: logging::Logging,
}

/// What a twin of DigitalOcean has where nothing else is said.
pub(crate) const DIGITALOCEAN_TOKEN: &str = "berth";
pub(crate) const DIGITALOCEAN_REGION: &str = "nyc3";
pub(crate) const DIGITALOCEAN_INSTANCE: &str = "1";
/// What a twin of Alibaba Cloud has where nothing else is said.
pub(crate) const ALIYUN_KEY_ID: &str = "berth";
pub(crate) const ALIYUN_KEY_SECRET: &str = "berth-secret";
pub(crate) const ALIYUN_REGION: &str = "cn-hangzhou";
pub(crate) const ALIYUN_INSTANCE: &str = "i-berth1";

/// Serves until SIGTERM or SIGINT.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let (name, provider, region, instances, per_instance, rate_limit, common) = match args.provider {
        ProviderArgs::Digitalocean(args) => (
            "digitalocean",
            Provider::DigitalOcean { token: args.token },
            args.region,
            args.instances,
            args.attach_limit,
            args.rate_limit,
            args.common,
        ),
        ProviderArgs::Aliyun(args) => (
            "aliyun",
            Provider::Aliyun {
                access_key_id: args.access_key_id,
                access_key_secret: args.access_key_secret,
                nvme: args.device_names == "nvme",
            },
            args.region,
            args.instances,
            16,
            args.rate_limit,
            args.common,
        ),
    };
    machine::require_root("cloud")?;
    logging::start(&common.logging);
    if common.purge {
        return Ok(berth_cloud::purge(&common.data_dir)?);
    }
    let mut delays = Delays::default();
    for delay in &common.delays {
        let Some((name, value)) = delay.split_once('=') else {
            bail!("the delay `{delay}` is not of the form WHAT=DURATION");
        };
        delays.set(name, value).map_err(anyhow::Error::msg)?;
    }
    let instances = instances.into_iter();
    let stop = stop_on_signal()?;
    let twin = Twin::open(Options {
        provider,
        region,
        listen: common.listen,
        data_dir: common.data_dir,
        devices: common.devices,
        instances: instances
            .map(|id| InstanceOptions { id, zone: None, kind: None, devices: true })
            .collect(),
        quotas: Quotas {
            disks: common.volume_limit,
            capacity_gib: common.capacity,
            disks_per_instance: per_instance,
            snapshots_per_disk: 256,
        },
        delays,
        rate_limit,
        faults: common.faults,
    })
    .await?;
    println!("berth cloud {name}: {}", twin.url());
    std::io::stdout().flush()?;
    twin.serve(stop).await.context("serve the twin")
}
