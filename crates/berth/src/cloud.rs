//! `berth cloud`: a twin of a cloud provider's block storage on loopback, to run and test drivers on without an account.
//!
//! [`CLOUDS`] has what `berth up --cloud` needs to know of each provider; it runs the same twin beside the driver
//! ([`crate::stack`]).

use std::ffi::OsString;
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
    #[arg(long, default_value_t = DIGITALOCEAN_ATTACH_LIMIT, value_name = "N")]
    attach_limit: u64,

    /// How many calls are taken: N/s, N/m, N/h, several of these, or none
    #[arg(long, default_value = DIGITALOCEAN_RATE_LIMIT, value_name = "LIMIT")]
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
    #[arg(long, default_value = ALIYUN_RATE_LIMIT, value_name = "LIMIT")]
    rate_limit: RateLimit,

    #[command(flatten)]
    common: Common,
}

/// The flags that every provider has.
#[derive(Debug, ClapArgs)]
struct Common {
    /// Where to listen, on loopback; port 0 takes a free one, at a later start the same if it is still free
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
    #[arg(long, default_value_t = VOLUME_LIMIT, value_name = "N")]
    volume_limit: u64,

    /// How many GiB the account's disks may have together
    #[arg(long, default_value_t = CAPACITY_GIB, value_name = "GIB")]
    capacity: u64,

    /// How long something takes, such as attach=2s: create, attach, detach, resize, snapshot, modify; device (until a device
    /// appears), listed (until lists show what was created), busy (how long a detach waits for a device in use)
    #[arg(long = "delay", value_name = "WHAT=DURATION")]
    delays: Vec<String>,

    /// What goes wrong, such as volumes.create=after:500: CALL=EFFECT, with ,after=N and ,times=N if wanted; effects are before:STATUS,
    /// after:STATUS, drop-before, drop-after, hang-before, hang-after, throttle, slow:DURATION, errored, no-device, late-device:DURATION, other-name
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
const DIGITALOCEAN_RATE_LIMIT: &str = "250/m,5000/h";
const DIGITALOCEAN_ATTACH_LIMIT: u64 = 15;
/// What a twin of Alibaba Cloud has where nothing else is said.
pub(crate) const ALIYUN_KEY_ID: &str = "berth";
pub(crate) const ALIYUN_KEY_SECRET: &str = "berth-secret";
pub(crate) const ALIYUN_REGION: &str = "cn-hangzhou";
pub(crate) const ALIYUN_INSTANCE: &str = "i-berth1";
const ALIYUN_RATE_LIMIT: &str = "1000/m";
const ALIYUN_ATTACH_LIMIT: u64 = 16;
/// What the twin of every provider has where nothing else is said.
const VOLUME_LIMIT: u64 = 100;
const CAPACITY_GIB: u64 = 102_400;
const SNAPSHOTS_PER_DISK: u64 = 256;

/// A provider whose twin `berth up --cloud` runs, and how Berth's driver for its disks is pointed there.
pub(crate) struct Cloud {
    /// Its name, which is that of the backend too.
    pub(crate) name: &'static str,
    /// The credentials that the twin takes, in words.
    pub(crate) credentials: &'static str,
    provider: fn() -> Provider,
    region: &'static str,
    rate_limit: &'static str,
    disks_per_instance: u64,
    /// The id of a server, counted from 1.
    pub(crate) instance: fn(usize) -> String,
    /// The driver's flags that name the twin's credentials.
    pub(crate) credential_flags: &'static [&'static str],
    /// The driver's flags that say where the twin is, for one server.
    pub(crate) address_flags: fn(&Address) -> Vec<OsString>,
    /// The driver's flags by which a node starts that asks nobody who it is, to take away what it has mounted.
    pub(crate) offline_flags: &'static [&'static str],
    /// A manifest to try, and the claim in it.
    pub(crate) example: Option<(&'static str, &'static str)>,
}

/// Where one server of a twin finds what it needs.
pub(crate) struct Address {
    pub(crate) api: String,
    pub(crate) metadata: String,
    pub(crate) devices: PathBuf,
}

/// Every provider that there is a twin of.
pub(crate) const CLOUDS: &[Cloud] = &[
    Cloud {
        name: "digitalocean",
        credentials: "token berth",
        provider: || Provider::DigitalOcean { token: DIGITALOCEAN_TOKEN.to_owned() },
        region: DIGITALOCEAN_REGION,
        rate_limit: DIGITALOCEAN_RATE_LIMIT,
        disks_per_instance: DIGITALOCEAN_ATTACH_LIMIT,
        instance: |number| number.to_string(),
        credential_flags: &["--token", DIGITALOCEAN_TOKEN],
        address_flags: |address| {
            vec![
                "--url".into(),
                (&address.api).into(),
                "--metadata-url".into(),
                (&address.metadata).into(),
                "--device-dir".into(),
                (&address.devices).into(),
            ]
        },
        offline_flags: &["--region=none", "--node-id=none"],
        example: Some(("examples/digitalocean.yaml", "pvc/csi-pvc")),
    },
    Cloud {
        name: "aliyun",
        credentials: "access key berth, secret berth-secret",
        provider: || Provider::Aliyun {
            access_key_id: ALIYUN_KEY_ID.to_owned(),
            access_key_secret: ALIYUN_KEY_SECRET.to_owned(),
            nvme: false,
        },
        region: ALIYUN_REGION,
        rate_limit: ALIYUN_RATE_LIMIT,
        disks_per_instance: ALIYUN_ATTACH_LIMIT,
        instance: |number| format!("i-berth{number}"),
        credential_flags: &["--access-key-id", ALIYUN_KEY_ID, "--access-key-secret", ALIYUN_KEY_SECRET],
        address_flags: |address| {
            vec![
                "--ecs-endpoint".into(),
                (&address.api).into(),
                "--metadata-url".into(),
                (&address.metadata).into(),
                "--device-dir".into(),
                (&address.devices).into(),
            ]
        },
        offline_flags: &["--region=none", "--zone=none", "--node-id=none"],
        example: None,
    },
];

impl Cloud {
    /// The provider of that name.
    pub(crate) fn find(name: &str) -> Option<&'static Self> {
        CLOUDS.iter().find(|cloud| cloud.name == name)
    }

    /// A twin with this provider's defaults, and that many servers.
    pub(crate) fn twin(&self, data_dir: PathBuf, servers: usize) -> anyhow::Result<Options> {
        let rate_limit = self.rate_limit.parse::<RateLimit>().map_err(anyhow::Error::msg)?;
        Ok(Options {
            provider: (self.provider)(),
            region: self.region.to_owned(),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            data_dir,
            devices: None,
            instances: instances((1..=servers).map(self.instance)),
            quotas: quotas(VOLUME_LIMIT, CAPACITY_GIB, self.disks_per_instance),
            delays: Delays::default(),
            rate_limit,
            faults: Vec::new(),
        })
    }
}

/// Servers of these ids, whose disks are devices of this machine.
fn instances(ids: impl Iterator<Item = String>) -> Vec<InstanceOptions> {
    ids.map(|id| InstanceOptions { id, zone: None, kind: None, devices: true }).collect()
}

fn quotas(disks: u64, capacity_gib: u64, disks_per_instance: u64) -> Quotas {
    Quotas { disks, capacity_gib, disks_per_instance, snapshots_per_disk: SNAPSHOTS_PER_DISK }
}

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
            ALIYUN_ATTACH_LIMIT,
            args.rate_limit,
            args.common,
        ),
    };
    machine::require_root("cloud", "attaches disks as loop devices")?;
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
    let stop = stop_on_signal()?;
    let twin = Twin::open(Options {
        provider,
        region,
        listen: common.listen,
        data_dir: common.data_dir,
        devices: common.devices,
        instances: self::instances(instances.into_iter()),
        quotas: quotas(common.volume_limit, common.capacity, per_instance),
        delays,
        rate_limit,
        faults: common.faults,
    })
    .await?;
    println!("berth cloud {name}: {}", twin.url());
    std::io::stdout().flush()?;
    twin.serve(stop).await.context("serve the twin")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::BACKENDS;

    #[test]
    fn every_cloud_has_a_twin_and_its_driver_takes_the_flags_for_it() {
        let address = Address {
            api: "http://127.0.0.1:1".to_owned(),
            metadata: "http://127.0.0.1:1/_node/1".to_owned(),
            devices: "/devices/1".into(),
        };
        for cloud in CLOUDS {
            let options = cloud.twin("/data".into(), 2).unwrap();
            assert_eq!(options.instances.len(), 2, "{}", cloud.name);
            let words = |flags: &[&str]| flags.iter().map(OsString::from).collect::<Vec<_>>();
            let online = [(cloud.address_flags)(&address), words(cloud.credential_flags)].concat();
            for backend in BACKENDS.iter().filter(|backend| backend.name == cloud.name) {
                for flags in [online.clone(), words(cloud.offline_flags)] {
                    let line = [words(&[backend.name]), flags].concat();
                    backend.command().try_get_matches_from(line).unwrap();
                }
            }
        }
    }
}
