//! Packs the sources of the framework for drivers into one compressed file, which `berth new --lang rust` unpacks.
//!
//! An entry is the length of its path, the path, the length of its content, and the content, with lengths as four bytes, the lowest first.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use flate2::Compression;
use flate2::write::GzEncoder;

/// The crates that berth-driver needs, and berth-driver.
const CRATES: [&str; 5] = ["berth-core", "berth-csi", "berth-driver", "berth-host", "berth-journal"];
/// Its documentation shows this file.
const EXAMPLE: &str = "examples/mycsi/src/main.rs";

fn main() -> io::Result<()> {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the crate is"));
    let root = here.join("../..").canonicalize()?;
    let mut files = Vec::new();
    for name in CRATES {
        let directory = Path::new("crates").join(name);
        files.push(directory.join("Cargo.toml"));
        collect(&root, &directory.join("src"), &mut files)?;
    }
    files.push(EXAMPLE.into());
    files.sort();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where to write")).join("framework.gz");
    let mut archive = GzEncoder::new(fs::File::create(out)?, Compression::best());
    for file in files {
        add(&mut archive, &file, &fs::read(root.join(&file))?)?;
    }
    let manifest = fs::read_to_string(root.join("Cargo.toml"))?;
    add(&mut archive, Path::new("Cargo.toml"), workspace(&manifest).as_bytes())?;
    add(&mut archive, Path::new("Cargo.lock"), &fs::read(root.join("Cargo.lock"))?)?;
    archive.finish()?;
    for watched in ["Cargo.toml", "Cargo.lock", EXAMPLE] {
        println!("cargo::rerun-if-changed={}", root.join(watched).display());
    }
    for name in CRATES {
        println!("cargo::rerun-if-changed={}", root.join("crates").join(name).display());
    }
    Ok(())
}

/// The sources below a directory, without tests, which need what is not carried.
fn collect(root: &Path, directory: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(root.join(directory))? {
        let entry = entry?;
        let (name, path) = (entry.file_name(), directory.join(entry.file_name()));
        if name == "tests" || name == "tests.rs" {
            continue;
        }
        if entry.file_type()?.is_dir() {
            collect(root, &path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

/// The workspace's manifest with no other members than these.
fn workspace(manifest: &str) -> String {
    let members = CRATES.map(|name| format!("\"crates/{name}\"")).join(", ");
    let lines = manifest.lines().filter(|line| !line.starts_with("default-members"));
    let lines = lines.map(|line| {
        if line.starts_with("members = ") { format!("members = [{members}]\n") } else { format!("{line}\n") }
    });
    lines.collect()
}

fn add(archive: &mut impl io::Write, path: &Path, content: &[u8]) -> io::Result<()> {
    for part in [path.to_str().expect("paths are plain").as_bytes(), content] {
        let length = u32::try_from(part.len()).expect("files are small");
        archive.write_all(&length.to_le_bytes())?;
        archive.write_all(part)?;
    }
    Ok(())
}
