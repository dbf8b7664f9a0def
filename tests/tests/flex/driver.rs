//! `berth flex`: the installed program, called by its path, with a real NFS server.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use berth_e2e::{driver, machine, nfs::Server, up::texts};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A plugin directory with installed drivers, and places for pods.
struct Node {
    dir: TempDir,
}

impl Node {
    fn new() -> Result<Self> {
        Ok(Self { dir: tempfile::tempdir()? })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn berth(&self, words: &[&str]) -> Result<String> {
        let plugins = self.path("plugins");
        let output = machine::command(driver::binary()?)
            .args(words)
            .args(["--plugin-dir", &plugins.display().to_string()])
            .output()?;
        let (out, err) = texts(&output);
        ensure!(output.status.success(), "{words:?}: {err}");
        Ok(out)
    }

    fn install(&self, driver: &str, settings: &[&str]) -> Result<()> {
        let (state, volumes) =
            (self.path("state").display().to_string(), self.path("volumes").display().to_string());
        let words =
            ["flex", "install", "--driver", driver, "--state-dir", &state, "--allowed-path", &volumes];
        self.berth(&[&words, settings].concat()).map(drop)
    }

    fn executable(&self, driver: &str) -> PathBuf {
        self.path(&format!("plugins/k8s~{driver}/{driver}"))
    }

    /// Calls a driver as the kubelet does: standard error and standard output are one, and there is nothing else in it
    /// than one JSON object.
    fn call(&self, driver: &str, words: &[&str]) -> Result<Value> {
        reply(machine::command(self.executable(driver)).args(words))
    }

    /// Makes a call that has to succeed.
    fn succeed(&self, driver: &str, words: &[&str]) -> Result<()> {
        let reply = self.call(driver, words)?;
        ensure!(reply == json!({ "status": "Success" }), "{words:?}: {reply}");
        Ok(())
    }

    /// Makes a call that has to fail, and gives the reason.
    fn fail(&self, driver: &str, words: &[&str]) -> Result<String> {
        let reply = self.call(driver, words)?;
        ensure!(reply["status"] == "Failure", "{words:?}: {reply}");
        Ok(reply["message"].as_str().context("a failure has a message")?.to_owned())
    }

    fn records(&self, driver: &str) -> Result<Vec<String>> {
        let directory = self.path(&format!("state/{driver}"));
        let mut found: Vec<String> = fs::read_dir(&directory)
            .with_context(|| directory.display().to_string())?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<_>>()?;
        found.retain(|name| name != "mounts");
        Ok(found)
    }

    /// Nothing is mounted below, and no record is left.
    fn nothing_left(&self, driver: &str) -> Result<()> {
        let mounts = machine::mounts_below(self.dir.path())?;
        ensure!(mounts.is_empty(), "still mounted: {mounts:?}");
        machine::until_detached(|| machine::loops_below(self.dir.path()))?;
        let records = self.records(driver)?;
        ensure!(records.is_empty(), "still recorded: {records:?}");
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = machine::clear_below(self.dir.path());
    }
}

fn reply(command: &mut std::process::Command) -> Result<Value> {
    let output = command.stdin(Stdio::null()).output()?;
    let (out, err) = texts(&output);
    ensure!(err.is_empty(), "on standard error: {err}");
    let reply: Value = serde_json::from_str(&out).with_context(|| format!("not one JSON object: {out:?}"))?;
    ensure!(output.status.success() == (reply["status"] != "Failure"), "{}: {reply}", output.status);
    Ok(reply)
}

/// The JSON document of a call-out about an NFS volume.
fn document(share: &str, more: &Value) -> String {
    let mut document = json!({
        "kubernetes.io/fsType": "nfs",
        "kubernetes.io/pvOrVolumeName": "test",
        "kubernetes.io/readwrite": "rw",
        "server": "127.0.0.1",
        "share": share,
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        document[key] = value.clone();
    }
    document.to_string()
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[test]
fn a_share_is_mounted_written_and_unmounted_with_and_without_a_leading_slash() -> Result<()> {
    let (server, node) = (Server::start(&[])?, Node::new()?);
    node.install("nfs", &["--mount-mode=fuse", "--default-mount-options", &server.options])?;
    let init = node.call("nfs", &["init"])?;
    ensure!(init["status"] == "Success" && init["capabilities"]["attach"] == false, "{init}");
    for share in ["export", "/export"] {
        let target = node.path("pods/1/volumes/k8s~nfs/test");
        for _ in 0..2 {
            node.succeed("nfs", &["mount", &text(&target), &document(share, &json!({}))])?;
        }
        ensure!(machine::mounts_below(node.dir.path())? == std::slice::from_ref(&target));
        fs::write(target.join("from-pod"), share)?;
        ensure!(fs::read_to_string(server.export().join("from-pod"))? == share);
        for _ in 0..2 {
            node.succeed("nfs", &["unmount", &text(&target)])?;
        }
        node.nothing_left("nfs")?;
        ensure!(target.is_dir(), "the directory is the kubelet's to remove");
    }
    // Read-only, and a part of the share.
    fs::create_dir_all(server.export().join("a/b"))?;
    fs::write(server.export().join("a/b/file"), "kept")?;
    let (target, more) = (node.path("pods/2"), json!({ "subDir": "a/b", "kubernetes.io/readwrite": "ro" }));
    node.succeed("nfs", &["mount", &text(&target), &document("export", &more)])?;
    ensure!(fs::read_to_string(target.join("file"))? == "kept");
    ensure!(fs::write(target.join("file"), "changed").is_err(), "the mount can be written");
    node.succeed("nfs", &["unmount", &text(&target)])?;
    node.nothing_left("nfs")
}

#[test]
fn every_call_out_has_a_reply_and_a_wrong_one_says_what_is_wrong() -> Result<()> {
    let node = Node::new()?;
    node.install("nfs", &["--mount-mode=fuse"])?;
    let document = document("export", &json!({}));
    for words in [
        &["getvolumename", &document][..],
        &["attach", &document, "node"],
        &["waitforattach", "", &document],
        &["isattached", &document, "node"],
        &["mountdevice", "/d", "", &document],
        &["unmountdevice", "/d"],
        &["detach", "test", "node"],
        &["of another version"],
        &[],
    ] {
        let reply = node.call("nfs", words)?;
        ensure!(reply == json!({ "status": "Not supported" }), "{words:?}: {reply}");
    }
    node.succeed("nfs", &["expandvolume", &document, "/d", "2", "1"])?;
    node.succeed("nfs", &["expandfs", &document, "", &text(&node.path("pod")), "2", "1"])?;
    let target = text(&node.path("pod"));
    let secret = "b3BlbiBzZXNhbWU=";
    for (words, expected) in [
        (vec!["mount", &target], "takes 2 arguments"),
        (vec!["mount", "pod", &document], "absolute path"),
        (vec!["mount", &target, "{\"kubernetes.io/secret/password\": \"b3BlbiBzZXNhbWU=\""], "JSON object"),
        (vec!["mount", &target, "{\"share\": \"export\"}"], "server"),
        (vec!["mount", &target, "{\"server\": \"127.0.0.1\", \"share\": \"e\", \"shar\": \"\"}"], "\"shar\""),
        (
            vec![
                "mount",
                &target,
                "{\"server\": \"s\", \"share\": \"e\", \"kubernetes.io/fsType\": \"ext4\"}",
            ],
            "ext4",
        ),
        (
            vec![
                "mount",
                &target,
                "{\"server\": \"s\", \"share\": \"e\", \"kubernetes.io/secret/mountOptions\": \"b3BlbiBzZXNhbWU=\"}",
            ],
            "secret",
        ),
    ] {
        let message = node.fail("nfs", &words)?;
        ensure!(message.contains(expected), "{words:?}: {message}");
        ensure!(!message.contains(secret) && !message.contains("open sesame"), "a secret: {message}");
    }
    // By hand, too.
    let berth = driver::binary()?;
    for words in
        [&["flex", "init"][..], &["flex", "--driver", "local", "init"], &["flex", "--driver=local", "init"]]
    {
        let reply = reply(machine::command(&berth).args(words))?;
        ensure!(reply["status"] == "Success", "{words:?}: {reply}");
    }
    let reply = reply(machine::command(&berth).args(["flex", "--driver", "x", "init"]))?;
    ensure!(reply["message"].as_str().is_some_and(|message| message.contains("nfs and local")), "{reply}");
    Ok(())
}

#[test]
fn a_server_that_is_not_there_and_one_that_is_not_allowed_leave_nothing() -> Result<()> {
    let node = Node::new()?;
    node.install(
        "nfs",
        &["--mount-mode=fuse", "--default-mount-options", "port=1", "--mount-timeout-seconds=5"],
    )?;
    let target = text(&node.path("pod"));
    let message = node.fail("nfs", &["mount", &target, &document("export", &json!({}))])?;
    ensure!(message.contains("127.0.0.1"), "{message}");
    node.nothing_left("nfs")?;
    node.install("nfs", &["--allowed-servers", "nfs.example.com"])?;
    let message = node.fail("nfs", &["mount", &target, &document("export", &json!({}))])?;
    ensure!(message.contains("127.0.0.1"), "{message}");
    node.nothing_left("nfs")
}

/// A call that is killed at any moment leaves what the next one completes or takes away.
#[test]
fn a_killed_mount_is_completed_by_the_next_or_taken_away() -> Result<()> {
    let (server, node) = (Server::start(&[])?, Node::new()?);
    node.install("nfs", &["--mount-mode=fuse", "--default-mount-options", &server.options])?;
    let (target, document) = (node.path("pod"), document("export", &json!({})));
    for round in 0_u64..12 {
        let mut child = machine::command(node.executable("nfs"))
            .args(["mount", &text(&target), &document])
            .stdout(Stdio::null())
            .spawn()?;
        std::thread::sleep(std::time::Duration::from_millis(round * 4));
        child.kill()?;
        child.wait()?;
        if round % 2 == 0 {
            node.succeed("nfs", &["mount", &text(&target), &document])?;
            ensure!(
                machine::mounts_below(node.dir.path())? == std::slice::from_ref(&target),
                "round {round}"
            );
            fs::write(target.join("file"), round.to_string())?;
        }
        node.succeed("nfs", &["unmount", &text(&target)])?;
        node.nothing_left("nfs").with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

#[test]
fn an_installation_replaces_the_program_as_a_whole_and_nothing_else_is_visible() -> Result<()> {
    let node = Node::new()?;
    let listing = |directory: &Path| -> Result<Vec<String>> {
        let mut names: Vec<String> = fs::read_dir(directory)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<_>>()?;
        names.sort();
        Ok(names)
    };
    node.install("nfs", &[])?;
    let executable = node.executable("nfs");
    let first = fs::metadata(&executable)?;
    ensure!(first.permissions().mode() & 0o7777 == 0o755);
    node.install("nfs", &["--mount-mode=fuse"])?;
    node.install("local", &[])?;
    ensure!(fs::metadata(&executable)?.ino() != first.ino(), "the same file was written again");
    ensure!(listing(&node.path("plugins"))? == ["k8s~local", "k8s~nfs"]);
    ensure!(listing(&node.path("plugins/k8s~nfs"))? == [".berth.json", "nfs"]);
    // A driver whose volumes are mounted stays until they are not.
    let (target, volume) = (node.path("pod"), node.path("volumes/v"));
    fs::create_dir_all(&volume)?;
    node.succeed("local", &["mount", &text(&target), &json!({ "path": volume }).to_string()])?;
    let refused = node.berth(&["flex", "uninstall", "--driver", "local"]).unwrap_err().to_string();
    ensure!(refused.contains(&text(&target)), "{refused}");
    node.succeed("local", &["unmount", &text(&target)])?;
    for driver in ["local", "nfs", "nfs"] {
        node.berth(&["flex", "uninstall", "--driver", driver])?;
    }
    ensure!(listing(&node.path("plugins"))?.is_empty());
    let refused = node.berth(&["flex", "install", "--vendor", "../x"]).unwrap_err().to_string();
    ensure!(refused.contains("--vendor"), "{refused}");
    Ok(())
}

#[test]
fn directories_and_images_of_this_machine_are_mounted_by_their_path() -> Result<()> {
    let node = Node::new()?;
    node.install("local", &[])?;
    let (volumes, target, second) = (node.path("volumes"), node.path("pod"), node.path("second"));
    fs::create_dir_all(volumes.join("a"))?;
    fs::write(volumes.join("a/file"), "kept")?;
    let mount =
        |target: &Path, options: Value| node.call("local", &["mount", &text(target), &options.to_string()]);
    ensure!(mount(&target, json!({ "path": volumes.join("a") }))?["status"] == "Success");
    ensure!(mount(&target, json!({ "path": volumes.join("a") }))?["status"] == "Success");
    ensure!(fs::read_to_string(target.join("file"))? == "kept");
    ensure!(machine::mounts_below(node.dir.path())? == std::slice::from_ref(&target));
    node.succeed("local", &["unmount", &text(&target)])?;
    node.nothing_left("local")?;

    std::os::unix::fs::symlink("/etc", volumes.join("link"))?;
    for (path, expected) in [
        ("/etc", "below one of"),
        (&*text(&volumes), "below one of"),
        (&*text(&volumes.join("../x")), "below one of"),
        (&*text(&volumes.join("link")), "link"),
        (&*text(&volumes.join("missing")), "does not exist"),
    ] {
        let reply = mount(&target, json!({ "path": path }))?;
        ensure!(
            reply["message"].as_str().is_some_and(|message| message.contains(expected)),
            "{path}: {reply}"
        );
        node.nothing_left("local")?;
    }
    ensure!(
        mount(&target, json!({ "path": volumes.join("new/deep"), "type": "DirectoryOrCreate" }))?["status"]
            == "Success"
    );
    node.succeed("local", &["unmount", &text(&target)])?;

    // An image: made, formatted, shared by two pods of this node, and grown.
    let image = json!({ "path": volumes.join("disk.img"), "type": "ImageOrCreate", "size": "64Mi", "kubernetes.io/fsType": "ext4" });
    let small =
        mount(&target, json!({ "path": volumes.join("disk.img"), "type": "ImageOrCreate", "size": "x" }))?;
    ensure!(small["message"].as_str().is_some_and(|message| message.contains("size")), "{small}");
    ensure!(mount(&target, image.clone())?["status"] == "Success");
    let mut reader = image.clone();
    reader["kubernetes.io/readwrite"] = json!("ro");
    ensure!(mount(&second, reader)?["status"] == "Success");
    fs::write(target.join("file"), "in the image")?;
    ensure!(fs::read_to_string(second.join("file"))? == "in the image");
    ensure!(fs::write(second.join("file"), "").is_err());
    ensure!(machine::loops_below(&volumes)?.len() == 1, "one device for one image");
    for target in [&target, &second] {
        node.succeed("local", &["unmount", &text(target)])?;
    }
    node.nothing_left("local")?;
    let sized = |target: &Path| -> Result<u64> {
        let found = rustix::fs::statvfs(target)?;
        Ok(found.f_blocks * found.f_frsize)
    };
    ensure!(mount(&target, image.clone())?["status"] == "Success");
    let before = sized(&target)?;
    let bytes = (128_u64 << 20).to_string();
    let grown = node.call("local", &["expandfs", &image.to_string(), "", &text(&target), &bytes, "1"])?;
    if grown["status"] != "Success" {
        // Without CAP_SYS_RESOURCE a mounted ext4 cannot grow; it does when it is mounted next.
        ensure!(
            grown["message"].as_str().is_some_and(|message| message.contains("CAP_SYS_RESOURCE")),
            "{grown}"
        );
        node.succeed("local", &["unmount", &text(&target)])?;
        node.nothing_left("local")?;
        ensure!(mount(&target, image.clone())?["status"] == "Success");
    }
    ensure!(sized(&target)? > before + (32 << 20), "it has not grown");
    ensure!(fs::read_to_string(target.join("file"))? == "in the image");
    node.succeed("local", &["unmount", &text(&target)])?;
    node.nothing_left("local")
}
