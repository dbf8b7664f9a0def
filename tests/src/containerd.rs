//! A containerd of a test's own: its state, its socket and its images lie below a temporary directory, and everything that it
//! started ends with it.
//!
//! Images are made here, of Debian's static busybox, as OCI layouts that `ctr` imports; nothing is pulled.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal};
use serde_json::json;
use tempfile::TempDir;

use crate::machine;

/// The image that the tests run.
pub const BUSYBOX: &str = "docker.io/library/busybox:latest";
/// An image whose user has a number.
pub const NUMBERED: &str = "localhost/numbered:1";
/// An image whose user has a name.
pub const NAMED: &str = "localhost/named:1";
/// What holds a pod together.
const PAUSE: &str = "localhost/pause:1";

/// How long it may take to start, and its containers to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A containerd that runs until this is dropped.
#[derive(Debug)]
pub struct Containerd {
    dir: TempDir,
    child: Child,
}

impl Containerd {
    /// Starts it, with the images of this module.
    pub fn start() -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("ctd-").rand_bytes(5).tempdir()?;
        let child = spawn(dir.path())?;
        let containerd = Self { dir, child };
        containerd.until_ready()?;
        containerd.import()?;
        Ok(containerd)
    }

    /// Its socket as `--cri-endpoint` takes it.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// Kills it; its containers go on.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Starts it again after a kill.
    pub fn restart(&mut self) -> Result<()> {
        self.child = spawn(self.dir.path())?;
        self.until_ready()
    }

    /// What it has besides images: containers, and what of them runs.
    pub fn containers(&self) -> Result<Vec<String>> {
        Ok(self.ctr(&["containers", "list", "-q"])?.lines().map(str::to_owned).collect())
    }

    /// Runs its command line tool.
    pub fn ctr(&self, args: &[&str]) -> Result<String> {
        let socket = self.socket();
        let socket = socket.to_str().context("the path is no text")?;
        machine::run("ctr", &[&["--address", socket, "--namespace", "k8s.io"], args].concat())
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("c.sock")
    }

    fn until_ready(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = self.ctr(&["plugins", "list"]) {
            let log = || fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            ensure!(Instant::now() < deadline, "containerd does not start: {error:#}\n{}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn import(&self) -> Result<()> {
        let root = self.dir.path().join("busybox");
        busybox(&root)?;
        let path = json!(["PATH=/bin"]);
        for (name, config) in [
            (BUSYBOX, json!({ "Env": path, "Cmd": ["sh", "-c", "echo by the image"] })),
            (NUMBERED, json!({ "Env": path, "Cmd": ["sleep", "1000000"], "User": "1234:2345" })),
            (NAMED, json!({ "Env": path, "Cmd": ["sleep", "1000000"], "User": "somebody" })),
            (PAUSE, json!({ "Env": path, "Entrypoint": ["sleep", "1000000000"] })),
        ] {
            let layout = self.dir.path().join("layout");
            write_layout(&layout, &root, name, &config)?;
            let archive = self.dir.path().join("layout.tar");
            let (layout_text, archive_text) = (text(&layout)?, text(&archive)?);
            machine::run("tar", &["-C", layout_text, "-cf", archive_text, "."])?;
            self.ctr(&["images", "import", archive_text])?;
            fs::remove_dir_all(&layout)?;
        }
        Ok(())
    }

    /// The processes between containerd and its containers, and those of the containers.
    fn processes(&self) -> Result<Vec<i32>> {
        let socket = self.socket();
        let mut parents = Vec::new();
        let mut shims = Vec::new();
        for entry in fs::read_dir("/proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            let words = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let mut words = words.split(|byte| *byte == 0);
            if words.any(|word| Path::new(&*String::from_utf8_lossy(word)) == socket) {
                shims.push(pid);
            }
            let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let parent =
                stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse::<i32>().ok());
            parents.push((pid, parent.unwrap_or(0)));
        }
        let mut found = shims;
        let mut next = 0;
        while let Some(parent) = found.get(next).copied() {
            found.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
            next += 1;
        }
        Ok(found)
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        let _ = self.kill();
        let deadline = Instant::now() + PATIENCE;
        while let Ok(found) = self.processes() {
            if found.is_empty() || Instant::now() > deadline {
                break;
            }
            for pid in found {
                let _ = Pid::from_raw(pid).map(|pid| rustix::process::kill_process(pid, Signal::KILL));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = machine::clear_below(self.dir.path());
    }
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("the path is no text")
}

fn spawn(dir: &Path) -> Result<Child> {
    let place = |name: &str| dir.join(name).display().to_string();
    // Without the right to it, runc cannot lower the score by which the kernel chooses what to kill.
    let config = format!(
        "version = 2\nroot = {:?}\nstate = {:?}\n[grpc]\naddress = {:?}\n\
         [plugins.\"io.containerd.internal.v1.opt\"]\npath = {:?}\n\
         [plugins.\"io.containerd.grpc.v1.cri\"]\nrestrict_oom_score_adj = true\nsandbox_image = {PAUSE:?}\n\
         [plugins.\"io.containerd.grpc.v1.cri\".cni]\nconf_dir = {:?}\n",
        place("root"),
        place("state"),
        place("c.sock"),
        place("opt"),
        place("cni")
    );
    fs::write(dir.join("config.toml"), config)?;
    let log = fs::File::options().create(true).append(true).open(dir.join("log"))?;
    let mut command = machine::command("containerd");
    command.arg("--config").arg(dir.join("config.toml"));
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.spawn().context("start containerd, which testbed/deps.sh installs")
}

/// The files of an image: busybox under the names of all its programs, and two users.
fn busybox(root: &Path) -> Result<()> {
    for directory in ["bin", "etc", "proc", "sys", "dev", "root", "tmp", "data"] {
        fs::create_dir_all(root.join(directory))?;
    }
    fs::set_permissions(root.join("tmp"), fs::Permissions::from_mode(0o1777))?;
    fs::copy("/bin/busybox", root.join("bin/busybox"))
        .context("copy busybox, of the package busybox-static")?;
    let listed = machine::run("/bin/busybox", &["--list"])?;
    if !listed.contains("sh") {
        bail!("/bin/busybox has no shell");
    }
    for program in listed.lines().filter(|name| *name != "busybox") {
        symlink("busybox", root.join("bin").join(program))?;
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\nsomebody:x:77:77::/:/bin/sh\n")?;
    fs::write(root.join("etc/group"), "root:x:0:\nsomebody:x:77:\n")?;
    Ok(())
}

/// Writes an OCI layout with one image of one layer.
fn write_layout(layout: &Path, root: &Path, name: &str, config: &serde_json::Value) -> Result<()> {
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    let blob = |path: &Path| -> Result<(String, u64)> {
        let sum = machine::run("sha256sum", &[text(path)?])?;
        let digest = sum.split_whitespace().next().context("sha256sum says nothing")?.to_owned();
        let size = fs::metadata(path)?.len();
        fs::rename(path, blobs.join(&digest))?;
        Ok((format!("sha256:{digest}"), size))
    };
    let written = |value: serde_json::Value| -> Result<(String, u64)> {
        fs::write(layout.join("blob"), serde_json::to_vec(&value)?)?;
        blob(&layout.join("blob"))
    };
    let layer = layout.join("layer.tar");
    machine::run(
        "tar",
        &["-C", text(root)?, "--numeric-owner", "--owner=0", "--group=0", "-cf", text(&layer)?, "."],
    )?;
    let (layer, layer_size) = blob(&layer)?;
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let (image, image_size) = written(json!({
        "architecture": architecture, "os": "linux", "config": config,
        "rootfs": { "type": "layers", "diff_ids": [layer] },
    }))?;
    let kind = |of: &str| format!("application/vnd.oci.image.{of}");
    let (manifest, manifest_size) = written(json!({
        "schemaVersion": 2, "mediaType": kind("manifest.v1+json"),
        "config": { "mediaType": kind("config.v1+json"), "digest": image, "size": image_size },
        "layers": [{ "mediaType": kind("layer.v1.tar"), "digest": layer, "size": layer_size }],
    }))?;
    let index = json!({
        "schemaVersion": 2,
        "manifests": [{
            "mediaType": kind("manifest.v1+json"), "digest": manifest, "size": manifest_size,
            "annotations": { "io.containerd.image.name": name },
        }],
    });
    fs::write(layout.join("index.json"), serde_json::to_vec(&index)?)?;
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    Ok(())
}
