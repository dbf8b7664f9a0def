//! Images made from files of this machine, for a containerd that pulls nothing.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use berth_e2e::{driver, machine};
use serde_json::json;

/// Makes an image of the binary under test and of tools of this machine, with the libraries that they need, and gives it
/// to the node.
pub(super) fn import(dir: &Path, name: &str, tools: &[&str]) -> Result<()> {
    let dir = dir.join(name);
    let root = dir.join("root");
    fs::create_dir_all(root.join("usr/sbin"))?;
    let program = root.join("berth");
    machine::run("strip", &["-o", text(&program)?, text(&driver::binary()?)?])?;
    with_libraries(&root, &program)?;
    for tool in tools {
        let found = machine::run("sh", &["-c", &format!("PATH=$PATH:/usr/sbin:/sbin command -v {tool}")])?;
        let copy = root.join("usr/sbin").join(tool);
        fs::copy(found.trim(), &copy).with_context(|| format!("copy {tool}"))?;
        with_libraries(&root, &copy)?;
    }
    let layer = dir.join("layer.tar");
    machine::run("tar", &["-C", text(&root)?, "--owner=0", "--group=0", "-cf", text(&layer)?, "."])?;
    let sum = machine::run("sha256sum", &[text(&layer)?])?;
    let sum = sum.split_whitespace().next().context("sha256sum prints a sum")?;
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = json!({
        "architecture": architecture, "os": "linux",
        "config": {"Entrypoint": ["/berth"], "Env": ["PATH=/usr/sbin"]},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{sum}")]},
    });
    fs::write(dir.join("config.json"), config.to_string())?;
    let tag = format!("docker.io/library/{name}:{}", env!("CARGO_PKG_VERSION"));
    let manifest = json!([{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]);
    fs::write(dir.join("manifest.json"), manifest.to_string())?;
    let archive = dir.join("image.tar");
    let files = ["manifest.json", "config.json", "layer.tar"];
    machine::run("tar", &[&["-C", text(&dir)?, "-cf", text(&archive)?], files.as_slice()].concat())?;
    let state = std::env::var("KUBE_STATE").context("KUBE_STATE names no testbed; run `make test-kube`")?;
    let socket = PathBuf::from(state).join("containerd.sock");
    let import = ["--address", text(&socket)?, "-n", "k8s.io", "images", "import", text(&archive)?];
    machine::run("ctr", &import)?;
    fs::remove_dir_all(&dir)?;
    Ok(())
}

/// Copies the libraries of a program to where it looks for them.
fn with_libraries(root: &Path, program: &Path) -> Result<()> {
    // One that is linked statically has none, which ldd takes for a mistake.
    let listed = machine::run("ldd", &[text(program)?]).unwrap_or_default();
    for library in listed.split_whitespace().filter(|word| word.starts_with('/')) {
        let copy = root.join(library.trim_start_matches('/'));
        fs::create_dir_all(copy.parent().context("a library is in a directory")?)?;
        fs::copy(library, copy).with_context(|| format!("copy {library}"))?;
    }
    Ok(())
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("the paths of a test are plain text")
}
