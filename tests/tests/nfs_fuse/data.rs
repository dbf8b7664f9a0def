//! What a pod writes, while the driver is killed and comes back.

use std::{
    collections::HashMap,
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use berth_csi::v1;
use berth_e2e::{Csi, machine};
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    calls::capability,
    world::{Part, Server},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_target_in_use_goes_out_of_sight_and_the_share_stays_with_the_others() -> Result<()> {
    let server = Server::start("4.1")?;
    let node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    let (held, other) = (create(&server, &csi, "held").await?, create(&server, &csi, "other").await?);
    for volume in [&held, &other] {
        volume.publish(&csi).await?;
        fs::write(volume.target.join("file"), "kept")?;
    }
    let file = fs::File::open(held.target.join("file"))?;
    held.unpublish(&csi).await?;
    ensure!(!held.target.exists(), "it is out of sight");
    ensure!(fs::read_to_string(other.target.join("file"))? == "kept", "whoever else has the share reads");
    fs::write(other.target.join("file"), "changed")?;
    ensure!(std::io::read_to_string(&file)? == "kept", "and so does who has it open");
    drop(file);
    other.unpublish(&csi).await?;
    for volume in [held, other] {
        volume.delete(&csi).await?;
    }
    server.nothing_left().await?;
    node.stop().await
}

/// A volume and where it is published.
struct Published {
    id: String,
    context: HashMap<String, String>,
    target: PathBuf,
}

async fn create(server: &Server, csi: &Csi, name: &str) -> Result<Published> {
    let request = v1::CreateVolumeRequest {
        name: name.to_owned(),
        volume_capabilities: vec![capability()],
        parameters: server.parameters().into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
        ..v1::CreateVolumeRequest::default()
    };
    let made = csi.controller.clone().create_volume(request).await?.into_inner();
    let volume = made.volume.context("a volume is made")?;
    let target = server.dir().join("pods").join(name);
    fs::create_dir_all(server.dir().join("pods"))?;
    Ok(Published { id: volume.volume_id, context: volume.volume_context.into_iter().collect(), target })
}

impl Published {
    async fn publish(&self, csi: &Csi) -> Result<()> {
        let request = v1::NodePublishVolumeRequest {
            volume_id: self.id.clone(),
            target_path: self.target.display().to_string(),
            volume_capability: Some(capability()),
            volume_context: self.context.clone().into_iter().collect(),
            ..v1::NodePublishVolumeRequest::default()
        };
        csi.node.clone().node_publish_volume(request).await?;
        Ok(())
    }

    async fn stats(&self, csi: &Csi) -> Result<Vec<v1::VolumeUsage>> {
        let request = v1::NodeGetVolumeStatsRequest {
            volume_id: self.id.clone(),
            volume_path: self.target.display().to_string(),
            ..v1::NodeGetVolumeStatsRequest::default()
        };
        Ok(csi.node.clone().node_get_volume_stats(request).await?.into_inner().usage)
    }

    async fn unpublish(&self, csi: &Csi) -> Result<()> {
        let request = v1::NodeUnpublishVolumeRequest {
            volume_id: self.id.clone(),
            target_path: self.target.display().to_string(),
        };
        csi.node.clone().node_unpublish_volume(request).await?;
        Ok(())
    }

    async fn delete(&self, csi: &Csi) -> Result<()> {
        let request =
            v1::DeleteVolumeRequest { volume_id: self.id.clone(), ..v1::DeleteVolumeRequest::default() };
        csi.controller.clone().delete_volume(request).await?;
        Ok(())
    }
}

/// A process as a pod has it: appends numbers to a file in its volume, each synced before it is told.
struct Writer {
    process: Child,
    told: BufReader<std::process::ChildStdout>,
}

impl Writer {
    fn start(dir: &Path) -> Result<Self> {
        let script =
            "n=0; while :; do n=$((n+1)); echo $n >>numbers && sync numbers || exit 1; echo $n; done";
        let mut process = machine::command("sh")
            .args(["-c", script])
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let told = BufReader::new(process.stdout.take().context("its output is a pipe")?);
        Ok(Self { process, told })
    }

    /// Waits until it has written so many more.
    fn goes_on(&mut self, more: usize) -> Result<u64> {
        let mut line = String::new();
        for _ in 0..more {
            line.clear();
            ensure!(self.told.read_line(&mut line)? > 0, "the pod's process failed");
        }
        Ok(line.trim().parse()?)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_goes_on_writing_while_the_driver_is_killed_and_comes_back() -> Result<()> {
    for version in ["3", "4.1"] {
        let server = Server::start(version)?;
        let mut node = server.drive(Part::Node).await?;
        let csi = Csi::connect(&server.endpoint(Part::Node))?;
        let (one, other) = (create(&server, &csi, "one").await?, create(&server, &csi, "other").await?);
        one.publish(&csi).await?;
        ensure!(server.serving()?.len() == 1, "a share is served by one process");
        let mut writer = Writer::start(&one.target)?;
        writer.goes_on(5)?;
        for _ in 0..3 {
            node.kill()?;
            writer.goes_on(5)?;
            node = server.drive(Part::Node).await?;
            writer.goes_on(5)?;
        }
        let csi = Csi::connect(&server.endpoint(Part::Node))?;
        let before = server.serving()?;
        one.publish(&csi).await?;
        other.publish(&csi).await?;
        ensure!(server.serving()? == before, "the driver takes the mount that is there");
        ensure!(one.stats(&csi).await?.iter().any(|usage| usage.total > 0), "the share has a size");
        let last = writer.goes_on(5)?;
        drop(writer);
        let numbers = fs::read_to_string(server.export().join("one/numbers"))?;
        let expected: Vec<String> = (1..=last).map(|number| number.to_string()).collect();
        let found: Vec<&str> = numbers.lines().take(expected.len()).collect();
        ensure!(found == expected, "what was synced is on the server's disk");
        for volume in [&one, &other] {
            volume.unpublish(&csi).await?;
            volume.unpublish(&csi).await?;
            volume.delete(&csi).await?;
        }
        server.nothing_left().await?;
        node.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_whose_process_died_is_made_again() -> Result<()> {
    let server = Server::start("4.1")?;
    let node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    let volume = create(&server, &csi, "volume").await?;
    volume.publish(&csi).await?;
    fs::write(volume.target.join("file"), "content")?;
    let [process] = server.serving()?[..] else { anyhow::bail!("one process serves") };
    kill_process(Pid::from_raw(i32::try_from(process)?).context("a process has a number")?, Signal::KILL)?;
    volume.publish(&csi).await?;
    ensure!(fs::read_to_string(volume.target.join("file"))? == "content", "it is there again");
    ensure!(!server.serving()?.contains(&process), "by another process");
    volume.unpublish(&csi).await?;
    volume.delete(&csi).await?;
    server.nothing_left().await?;
    node.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_share_that_nobody_uses_does_not_stay_mounted() -> Result<()> {
    let server = Server::start("4.1")?;
    let node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    let volume = create(&server, &csi, "volume").await?;
    let gone = create(&server, &csi, "gone").await?;
    gone.delete(&csi).await?;
    ensure!(gone.publish(&csi).await.is_err(), "a volume that is gone is not published");
    server.nothing_left().await?;
    // As of a driver that was killed before it had bound anything.
    volume.publish(&csi).await?;
    machine::run("umount", &[&volume.target.display().to_string()])?;
    ensure!(server.serving()?.len() == 1, "the share is mounted still");
    node.stop().await?;
    let node = server.drive(Part::Node).await?;
    server.nothing_left().await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    volume.unpublish(&csi).await?;
    volume.delete(&csi).await?;
    node.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_answers_while_a_server_does_not() -> Result<()> {
    let mut server = Server::start("4.1")?;
    let node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    let volume = create(&server, &csi, "volume").await?;
    volume.publish(&csi).await?;
    server.control("stop")?;
    // Whatever they say, they say it.
    let limit = std::time::Duration::from_secs(50);
    let _ = tokio::time::timeout(limit, volume.stats(&csi)).await.context("statistics hang")?;
    let _ = tokio::time::timeout(limit, volume.publish(&csi)).await.context("publishing hangs")?;
    tokio::time::timeout(limit, volume.unpublish(&csi)).await.context("unpublishing hangs")??;
    server.nothing_left().await?;
    server.control("cont")?;
    volume.delete(&csi).await?;
    node.stop().await
}
