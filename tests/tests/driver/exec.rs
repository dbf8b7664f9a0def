//! Programs as drivers (`berth driver exec`): the examples with csi-sanity, kill -9 after every call, and secrets.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use berth_csi::{Client, v1};
use berth_e2e::{driver, machine, program::Program, sanity};
use tonic::Code;

/// How long one call may take.
const CALL: std::time::Duration = std::time::Duration::from_secs(60);

/// A program as a driver, with everything in one directory.
struct Bed {
    dir: tempfile::TempDir,
    args: Vec<String>,
    running: Option<Program>,
}

impl Bed {
    async fn start(program: &Path, args: &[&str]) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("ex-").rand_bytes(5).tempdir()?;
        let text = |name: &str| dir.path().join(name).display().to_string();
        let mut words = vec!["driver".to_owned(), "exec".to_owned(), "--program".to_owned()];
        words.push(program.display().to_string());
        words.extend(["--endpoint".to_owned(), format!("unix://{}", text("csi.sock"))]);
        words.extend(["--state-dir".to_owned(), text("state"), "--node-id".to_owned(), "node-1".to_owned()]);
        words.extend(args.iter().map(ToString::to_string));
        let mut bed = Self { dir, args: words, running: None };
        bed.restart().await?;
        Ok(bed)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn endpoint(&self) -> String {
        format!("unix://{}", self.path("csi.sock").display())
    }

    fn client(&self) -> Result<Client> {
        Ok(Client::connect(&self.endpoint().parse()?))
    }

    /// Kills the driver if it runs, and starts it.
    async fn restart(&mut self) -> Result<()> {
        if let Some(mut running) = self.running.take() {
            running.kill()?;
        }
        let args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        let root = self.path("root").display().to_string();
        let environment = [("ROOT", root.as_str()), ("NODE_ID", "node-1")];
        let mut running = Program::start(&driver::binary()?, &args, &environment, self.path("driver.log"))?;
        running.says("ready").await?;
        self.running = Some(running);
        Ok(())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("driver.log")).unwrap_or_default()
    }

    /// Stops the driver, and checks that nothing is mounted, attached or recorded.
    async fn finish(mut self) -> Result<()> {
        self.running.take().context("the driver runs")?.stop().await?;
        let mounts = machine::mounts_below(self.dir.path())?;
        ensure!(mounts.is_empty(), "mounted: {mounts:?}");
        machine::until_detached(|| machine::loops_below(self.dir.path()))?;
        for directory in ["state/mounted", "state/volumes", "state/volumes/snapshots", "root"] {
            let entries = fs::read_dir(self.path(directory)).into_iter().flatten().filter_map(Result::ok);
            let files: Vec<_> = entries
                .map(|entry| entry.file_name())
                .filter(|name| name != "snapshots" && name != ".snapshots")
                .collect();
            ensure!(files.is_empty(), "left in {directory}: {files:?}");
        }
        Ok(())
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.running = None;
        let _ = machine::clear_below(self.dir.path());
    }
}

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/exec").join(name)
}

async fn conforms(program: &str, args: &[&str], access: &str, least: usize) -> Result<()> {
    let bed = Bed::start(&example(program), args).await?;
    let arguments = [
        format!("--csi.endpoint={}", bed.endpoint()),
        format!("--csi.mountdir={}", bed.path("mount").display()),
        format!("--csi.stagingdir={}", bed.path("staging").display()),
        format!("--csi.testvolumeaccesstype={access}"),
        "--csi.testvolumesize=104857600".to_owned(),
        "--csi.testvolumeexpandsize=209715200".to_owned(),
    ];
    let outcome = sanity::run(bed.dir.path(), &arguments)?;
    writeln!(std::io::stderr(), "csi-sanity, examples/exec/{program} with {access} access: {outcome}")?;
    ensure!(outcome.failures.is_empty(), "{}\n{}", outcome.failures.join("\n"), bed.log());
    ensure!(outcome.count("passed") >= least, "{outcome}");
    bed.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shell_example_conforms() -> Result<()> {
    conforms("directory.sh", &[], "mount", 62).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_example_conforms_with_filesystems_and_raw_devices() -> Result<()> {
    conforms("image.py", &["--stays"], "mount", 57).await?;
    conforms("image.py", &["--stays"], "block", 57).await
}

fn capability() -> v1::VolumeCapability {
    use v1::volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode};
    v1::VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        // It grows mounted, also where root lacks CAP_SYS_RESOURCE, which ext4 needs for that.
        access_type: Some(AccessType::Mount(MountVolume {
            fs_type: "btrfs".to_owned(),
            ..Default::default()
        })),
    }
}

fn create(name: &str) -> v1::CreateVolumeRequest {
    v1::CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(v1::CapacityRange { required_bytes: 128 << 20, limit_bytes: 0 }),
        volume_capabilities: vec![capability()],
        ..Default::default()
    }
}

/// Each call is made twice, with the driver killed after the first: the answers have to be the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_after_any_call_loses_nothing_and_leaves_nothing() -> Result<()> {
    macro_rules! twice {
        ($bed:ident, $request:expr) => {{
            let first =
                $bed.client()?.call(CALL, $request).await.map_err(|status| anyhow::anyhow!("{status}"))?;
            $bed.restart().await?;
            let second =
                $bed.client()?.call(CALL, $request).await.map_err(|status| anyhow::anyhow!("{status}"))?;
            ensure!(first == second, "{first:?} and after a kill {second:?}");
            second
        }};
    }
    let mut bed = Bed::start(&example("image.py"), &["--stays"]).await?;
    let volume = twice!(bed, create("kept")).volume.context("a volume")?;
    let id = || volume.volume_id.clone();
    let node = || "node-1".to_owned();
    let attach = || v1::ControllerPublishVolumeRequest {
        volume_id: id(),
        node_id: node(),
        volume_capability: Some(capability()),
        volume_context: volume.volume_context.clone(),
        ..Default::default()
    };
    let publish_context = twice!(bed, attach()).publish_context;
    let (staging, target) = (bed.path("staging"), bed.path("target"));
    let (staging, target) = (staging.display().to_string(), target.display().to_string());
    let stage = || v1::NodeStageVolumeRequest {
        volume_id: id(),
        staging_target_path: staging.clone(),
        volume_capability: Some(capability()),
        publish_context: publish_context.clone(),
        ..Default::default()
    };
    twice!(bed, stage());
    let publish = || v1::NodePublishVolumeRequest {
        volume_id: id(),
        staging_target_path: staging.clone(),
        target_path: target.clone(),
        volume_capability: Some(capability()),
        publish_context: publish_context.clone(),
        ..Default::default()
    };
    twice!(bed, publish());
    fs::write(Path::new(&target).join("file"), "kept")?;
    let grow = || v1::ControllerExpandVolumeRequest {
        volume_id: id(),
        capacity_range: Some(v1::CapacityRange { required_bytes: 256 << 20, limit_bytes: 0 }),
        ..Default::default()
    };
    ensure!(twice!(bed, grow()).node_expansion_required, "the filesystem has to grow, too");
    let node_grow = || v1::NodeExpandVolumeRequest {
        volume_id: id(),
        volume_path: target.clone(),
        staging_target_path: staging.clone(),
        capacity_range: Some(v1::CapacityRange { required_bytes: 256 << 20, limit_bytes: 0 }),
        ..Default::default()
    };
    twice!(bed, node_grow());
    let client = bed.client()?;
    let stats = client.call(
        CALL,
        v1::NodeGetVolumeStatsRequest { volume_id: id(), volume_path: target.clone(), ..Default::default() },
    );
    let total = stats.await?.usage.first().map_or(0, |usage| usage.total);
    ensure!(total > 200 << 20, "{total} bytes after growing to 256 MiB");
    ensure!(fs::read_to_string(Path::new(&target).join("file"))? == "kept");

    let attached = client.call(CALL, v1::DeleteVolumeRequest { volume_id: id(), ..Default::default() });
    let refused = attached.await.expect_err("an attached volume is not deleted");
    ensure!(refused.code() == Code::FailedPrecondition, "{refused}");
    let unpublish = || v1::NodeUnpublishVolumeRequest { volume_id: id(), target_path: target.clone() };
    twice!(bed, unpublish());
    let unstage = || v1::NodeUnstageVolumeRequest { volume_id: id(), staging_target_path: staging.clone() };
    twice!(bed, unstage());
    let detach =
        || v1::ControllerUnpublishVolumeRequest { volume_id: id(), node_id: node(), ..Default::default() };
    twice!(bed, detach());
    twice!(bed, v1::DeleteVolumeRequest { volume_id: id(), ..Default::default() });
    bed.finish().await
}

/// A program that is killed in the middle, prints its secret, or refuses.
const MISBEHAVES: &str = r#"#!/bin/sh
document=$(cat)
echo "got $document" >&2
case $1 in
describe) echo '{"version":1,"name":"odd.example","operations":["create","delete","publish"]}' ;;
create)
    touch "$ROOT.$BERTH_ID"
    case $BERTH_NAME in
    dies) kill -9 $$ ;;
    hangs) exec sleep 1000 ;;
    garbage) echo "$document" tail ;;
    fails) echo "it failed with $document" >&2; exit 7 ;;
    full) echo '{"error":{"code":"RESOURCE_EXHAUSTED","message":"full"}}' ;;
    small) echo '{"capacity":1}' ;;
    esac ;;
delete) rm -f "$ROOT.$BERTH_ID" ;;
esac
"#;

#[tokio::test(flavor = "multi_thread")]
async fn what_a_program_does_wrong_is_taken_back_and_its_secrets_are_said_nowhere() -> Result<()> {
    const CANARY: &str = "canary-5f1c";
    let scripts = tempfile::tempdir()?;
    let (body, script) = (scripts.path().join("body"), scripts.path().join("driver"));
    fs::write(&body, MISBEHAVES)?;
    fs::set_permissions(&body, fs::Permissions::from_mode(0o755))?;
    machine::run("cp", &[&body.display().to_string(), &script.display().to_string()])?;
    let bed = Bed::start(&script, &["--call-timeout-seconds", "2", "--log", "debug"]).await?;
    let client = bed.client()?;
    for (name, code, says) in [
        ("dies", Code::Unavailable, "create: the program ended with signal 9"),
        ("hangs", Code::Unavailable, "create: the program did not answer within 2s and was killed"),
        ("garbage", Code::Unavailable, "create: the program printed no JSON"),
        ("fails", Code::Unavailable, "create: the program ended with exit status 7"),
        ("full", Code::ResourceExhausted, "create: full"),
        ("small", Code::Unavailable, "create: the program made a volume of 1"),
    ] {
        let mut request = create(name);
        request.secrets = [("password".to_owned(), CANARY.to_owned())].into();
        let status = client.call(CALL, request).await.expect_err(name);
        ensure!(status.code() == code && status.message().contains(says), "{name}: {status}");
        ensure!(!status.message().contains(CANARY), "{name}: {status}");
    }
    // Whatever went wrong, what it had made is removed.
    let left: Vec<_> = fs::read_dir(bed.dir.path())?
        .filter_map(Result::ok)
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("root."))
        .collect();
    ensure!(left.is_empty(), "{left:?}");
    let volume = client.call(CALL, create("works")).await?.volume.context("a volume")?;
    let deletion = v1::DeleteVolumeRequest { volume_id: volume.volume_id, ..Default::default() };
    client.call(CALL, deletion).await?;
    let log = bed.log();
    ensure!(log.contains("got {") && !log.contains(CANARY), "{log}");
    bed.finish().await
}

#[test]
fn a_program_that_cannot_be_served_is_refused_at_the_start() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let state = dir.path().join("state").display().to_string();
    let text = dir.path().join("text").display().to_string();
    fs::write(&text, "no program")?;
    for (program, says) in [
        ("/nowhere/driver", "/nowhere/driver cannot be run: No such file"),
        (&*text, "may not be executed; run chmod +x on it"),
        ("/bin/true", "missing field `version`"),
        ("/bin/false", "describe: the program ended with exit status 1"),
    ] {
        let mut command = machine::command(driver::binary()?);
        let endpoint = format!("unix://{}", dir.path().join("csi.sock").display());
        command.args([
            "driver",
            "exec",
            "--program",
            program,
            "--state-dir",
            &state,
            "--endpoint",
            &endpoint,
        ]);
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1) && said.contains(says), "{program}: {said}");
    }
    Ok(())
}
