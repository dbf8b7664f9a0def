//! The drivers of clouds against twins of their providers, with real block devices: csi-sanity, every spec that the cloud can do.

use std::{fs, io::Write as _, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::{
    driver,
    program::Program,
    sanity::{self, Outcome, SPECS},
};
use serde_json::Value;

/// What a provider's test needs to know of it.
struct Provider {
    /// Its name in `berth cloud` and `berth driver`.
    name: &'static str,
    /// The machine that the twin has.
    machine: &'static str,
    /// The flag for the address of the API.
    url: &'static str,
    credentials: &'static [(&'static str, &'static str)],
    /// What must not be in a log.
    secrets: &'static [&'static str],
    /// The parameters of volumes, and those that are changed.
    parameters: &'static str,
    mutable: Option<&'static str>,
    /// Words in the names of specs about what the provider has no call for.
    cannot: &'static [&'static str],
}

/// It has no attachments for reading only, no parameters that change, no snapshots of groups, and does not say how volumes are.
const DIGITALOCEAN: Provider = Provider {
    name: "digitalocean",
    machine: "1",
    url: "--url",
    credentials: &[("DIGITALOCEAN_ACCESS_TOKEN", "berth")],
    secrets: &["Bearer", "berth-token"],
    parameters: "",
    mutable: None,
    cannot: &[
        "readonly",
        "already published but is incompatible",
        "ModifyVolume",
        "volume attribute class",
        "VolumeGroupSnapshot",
        "GroupController",
        "Health",
    ],
};

/// It has no attachments for reading only, and does not say how volumes are. Snapshots of groups are in its API and not in the driver.
const ALIYUN: Provider = Provider {
    name: "aliyun",
    machine: "i-berth1",
    url: "--ecs-endpoint",
    credentials: &[
        ("ALIBABA_CLOUD_ACCESS_KEY_ID", "berth"),
        ("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "berth-secret"),
    ],
    secrets: &["berth-secret", "Signature="],
    // The one type that comes in 1 GiB.
    parameters: "type: cloud_auto\n",
    mutable: Some("burstingEnabled: \"true\"\ndiskTags/team: blue\n"),
    cannot: &[
        "readonly",
        "already published but is incompatible",
        "VolumeGroupSnapshot",
        "GroupController",
        "Health",
    ],
};

/// A cloud of one machine, and its driver.
struct Bench {
    provider: &'static Provider,
    dir: tempfile::TempDir,
    cloud: Program,
    driver: Program,
}

impl Bench {
    async fn start(provider: &'static Provider) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let berth = driver::binary()?;
        let path = |name: &str| dir.path().join(name).display().to_string();
        let data = path("cloud");
        let mut words = vec![
            "cloud",
            provider.name,
            "--listen",
            "127.0.0.1:0",
            "--data-dir",
            &data,
            "--rate-limit",
            "none",
        ];
        // The suite does hundreds of things, one after the other.
        for delay in ["attach=10ms", "detach=10ms", "resize=10ms", "snapshot=10ms", "modify=10ms"] {
            words.extend(["--delay", delay]);
        }
        let mut cloud = Program::start(&berth, &words, &[], dir.path().join("cloud.log"))?;
        cloud.says("http://127.0.0.1:").await?;
        let running = dir.path().join("cloud/cloud.json");
        let written = async {
            while !running.exists() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), written).await.context("there is no cloud.json")?;
        let told: Value = serde_json::from_str(&fs::read_to_string(&running)?)?;
        let text =
            |value: &Value| value.as_str().map(ToOwned::to_owned).context("cloud.json has no such text");
        let (url, metadata) = (text(&told["url"])?, text(&told["metadata"][provider.machine])?);
        let devices = format!("{}/{}", text(&told["devices"])?, provider.machine);
        let (state, endpoint) = (path("state"), format!("unix://{}", path("csi.sock")));
        let words = [
            "driver",
            provider.name,
            provider.url,
            &url,
            "--metadata-url",
            &metadata,
            "--device-dir",
            &devices,
            "--state-dir",
            &state,
            "--endpoint",
            &endpoint,
        ];
        let mut driver = Program::start(&berth, &words, provider.credentials, dir.path().join("driver.log"))?;
        driver.says("ready").await?;
        Ok(Self { provider, dir, cloud, driver })
    }

    fn sanity(&self, access: &str) -> Result<Outcome> {
        let file = |name: &str, path: &Path| format!("--{name}={}", path.display());
        let parameters = self.dir.path().join("parameters.yaml");
        fs::write(&parameters, self.provider.parameters)?;
        let mut args = vec![
            format!("--csi.endpoint=unix://{}", self.dir.path().join("csi.sock").display()),
            file("csi.mountdir", &self.dir.path().join("mount")),
            file("csi.stagingdir", &self.dir.path().join("staging")),
            format!("--csi.testvolumeaccesstype={access}"),
            "--csi.testnodevolumeattachlimit".to_owned(),
            "--csi.testvolumesize=1073741824".to_owned(),
            "--csi.testvolumeexpandsize=2147483648".to_owned(),
            file("csi.testvolumeparameters", &parameters),
        ];
        if let Some(mutable) = self.provider.mutable {
            let path = self.dir.path().join("mutable.yaml");
            fs::write(&path, mutable)?;
            args.push(file("csi.testvolumemutableparameters", &path));
        }
        sanity::run(self.dir.path(), &args)
    }

    /// Ends both, and sees that nothing is left of the cloud.
    async fn finish(self) -> Result<()> {
        self.driver.stop().await?;
        let state = self.dir.path().join("cloud");
        self.cloud.stop().await?;
        let purge = berth_e2e::machine::command(driver::binary()?)
            .args(["cloud", self.provider.name, "--purge", "--data-dir"])
            .arg(&state)
            .output()?;
        ensure!(purge.status.success(), "{}", String::from_utf8_lossy(&purge.stderr));
        Ok(())
    }
}

async fn conforms(provider: &'static Provider, access: &str) -> Result<()> {
    let bench = Bench::start(provider).await?;
    let outcome = tokio::task::block_in_place(|| bench.sanity(access));
    let log = fs::read_to_string(bench.dir.path().join("driver.log")).unwrap_or_default();
    let outcome = outcome.with_context(|| log.clone())?;
    writeln!(std::io::stderr(), "csi-sanity, {} with {access} access: {outcome}", provider.name)?;
    ensure!(outcome.failures.is_empty(), "csi-sanity failed:\n{}\n{log}", outcome.failures.join("\n"));
    let can = |skipped: &&String| !provider.cannot.iter().any(|word| skipped.contains(word));
    let unexpected: Vec<_> = outcome.skipped.iter().filter(can).collect();
    ensure!(unexpected.is_empty(), "skipped: {unexpected:#?}");
    ensure!(outcome.count("passed") + outcome.skipped.len() == SPECS, "{outcome}");
    ensure!(!provider.secrets.iter().any(|secret| log.contains(secret)), "a secret is in the log");
    tokio::time::timeout(Duration::from_secs(60), bench.finish()).await?
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_volumes_of_digitalocean_conform() -> Result<()> {
    conforms(&DIGITALOCEAN, "mount").await
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_volumes_of_digitalocean_conform() -> Result<()> {
    conforms(&DIGITALOCEAN, "block").await
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_volumes_of_aliyun_conform() -> Result<()> {
    conforms(&ALIYUN, "mount").await
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_volumes_of_aliyun_conform() -> Result<()> {
    conforms(&ALIYUN, "block").await
}
