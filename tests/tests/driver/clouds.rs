//! The drivers of clouds against twins of their providers, with real block devices: csi-sanity, every spec that the cloud can do.

use std::{fs, io::Write as _, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::{
    driver,
    program::Program,
    sanity::{self, Outcome, SPECS},
};
use serde_json::Value;

/// What DigitalOcean has no call for: attachments for reading only, parameters that change, snapshots of groups, and the health
/// of a volume.
const DIGITALOCEAN_CANNOT: [&str; 7] = [
    "readonly",
    "already published but is incompatible",
    "ModifyVolume",
    "volume attribute class",
    "VolumeGroupSnapshot",
    "GroupController",
    "Health",
];

/// A cloud of one machine, and its driver.
struct Bench {
    dir: tempfile::TempDir,
    cloud: Program,
    driver: Program,
}

impl Bench {
    async fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let berth = driver::binary()?;
        let path = |name: &str| dir.path().join(name).display().to_string();
        let data = path("cloud");
        let words =
            ["cloud", "digitalocean", "--listen", "127.0.0.1:0", "--data-dir", &data, "--rate-limit", "none"];
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
        let (url, metadata) = (text(&told["url"])?, text(&told["metadata"]["1"])?);
        let devices = format!("{}/1", text(&told["devices"])?);
        let (state, endpoint) = (path("state"), format!("unix://{}", path("csi.sock")));
        let words = [
            "driver",
            "digitalocean",
            "--url",
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
        let token = [("DIGITALOCEAN_ACCESS_TOKEN", "berth")];
        let mut driver = Program::start(&berth, &words, &token, dir.path().join("driver.log"))?;
        driver.says("ready").await?;
        Ok(Self { dir, cloud, driver })
    }

    fn sanity(&self, access: &str) -> Result<Outcome> {
        let file = |name: &str, path: &Path| format!("--{name}={}", path.display());
        let args = [
            format!("--csi.endpoint=unix://{}", self.dir.path().join("csi.sock").display()),
            file("csi.mountdir", &self.dir.path().join("mount")),
            file("csi.stagingdir", &self.dir.path().join("staging")),
            format!("--csi.testvolumeaccesstype={access}"),
            "--csi.testnodevolumeattachlimit".to_owned(),
            "--csi.testvolumesize=1073741824".to_owned(),
            "--csi.testvolumeexpandsize=2147483648".to_owned(),
        ];
        sanity::run(self.dir.path(), &args)
    }

    /// Ends both, and sees that nothing is left of the cloud.
    async fn finish(self) -> Result<()> {
        self.driver.stop().await?;
        let state = self.dir.path().join("cloud");
        self.cloud.stop().await?;
        let purge = berth_e2e::machine::command(driver::binary()?)
            .args(["cloud", "digitalocean", "--purge", "--data-dir"])
            .arg(&state)
            .output()?;
        ensure!(purge.status.success(), "{}", String::from_utf8_lossy(&purge.stderr));
        Ok(())
    }
}

async fn conforms(access: &str) -> Result<()> {
    let bench = Bench::start().await?;
    let outcome = tokio::task::block_in_place(|| bench.sanity(access));
    let log = fs::read_to_string(bench.dir.path().join("driver.log")).unwrap_or_default();
    let outcome = outcome.with_context(|| log.clone())?;
    writeln!(std::io::stderr(), "csi-sanity, digitalocean with {access} access: {outcome}")?;
    ensure!(outcome.failures.is_empty(), "csi-sanity failed:\n{}\n{log}", outcome.failures.join("\n"));
    let can = |skipped: &&String| !DIGITALOCEAN_CANNOT.iter().any(|word| skipped.contains(word));
    let unexpected: Vec<_> = outcome.skipped.iter().filter(can).collect();
    ensure!(unexpected.is_empty(), "skipped: {unexpected:#?}");
    ensure!(outcome.count("passed") + outcome.skipped.len() == SPECS, "{outcome}");
    ensure!(!log.contains("Bearer") && !log.contains("berth-token"), "the token is in the log");
    tokio::time::timeout(Duration::from_secs(60), bench.finish()).await?
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_volumes_of_digitalocean_conform() -> Result<()> {
    conforms("mount").await
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_volumes_of_digitalocean_conform() -> Result<()> {
    conforms("block").await
}
