//! `berth backup` and `berth restore`: what a machine knows, in one file, and back.
//!
//! A backup is a tar archive of the API server's journal, its certificates and keys, and the drivers' records; the data of
//! volumes is not in it. It ends with a list of its files and their checksums, by which a restore knows that it is whole.
//!
//! It is consistent while Berth runs. A journal is only appended to, so a copy of it is a state that it had; its high-water mark
//! is copied first and says no more than the copy holds. Objects are copied before drivers' records: a volume that an object
//! names has its record, and one that no object names yet can be adopted (`berth adopt`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use berth_apiserver::store;
use berth_host::path::Dir;
use clap::Args as ClapArgs;
use serde::{Deserialize, Serialize};

use crate::driver::BACKENDS;
use crate::machine;
use crate::stack;

/// The API server's directory in the data directory.
const API: &str = "apiserver";
/// Below it: its objects, and its certificates and keys.
const STORE: &str = "store";
const PKI: &str = "pki";
/// In a driver's directory: where its records are, and which.
const STATE: &str = "state";
const RECORDS: &str = "volumes.journal";
/// The last file of a backup.
const MANIFEST: &str = "berth-backup.json";
/// The blocks of a tar archive.
const BLOCK: usize = 512;
/// How often a journal that is rewritten meanwhile is copied again.
const TRIES: usize = 10;

/// Copy objects, certificates and drivers' records into one file.
#[derive(Debug, ClapArgs)]
pub(crate) struct BackupArgs {
    #[command(flatten)]
    directory: machine::DataDirArg,

    /// The file to write, which must not exist; it holds private keys, and only its owner may read it
    file: PathBuf,
}

/// Put back what a backup holds.
#[derive(Debug, ClapArgs)]
pub(crate) struct RestoreArgs {
    #[command(flatten)]
    directory: machine::DataDirArg,

    /// The file that holds the backup
    file: PathBuf,

    /// Replace drivers' records that are there, too: volumes made since the backup are then kept aside as lost
    #[arg(long)]
    driver_records: bool,
}

/// What a backup says about itself.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    version: u32,
    berth: String,
    made: jiff::Timestamp,
    /// The CRC-32 of each file, as far as it is not obvious from the archive whether it is whole.
    files: BTreeMap<String, u32>,
}

/// Writes a backup of a data directory, also of one in use.
pub(crate) fn backup(args: &BackupArgs) -> anyhow::Result<()> {
    let data_dir = std::path::absolute(&args.directory.data_dir)?;
    let files = collect(&data_dir)?;
    ensure!(
        files.keys().any(|path| path.ends_with("objects")),
        "{} holds no objects of an API server; is it the right --data-dir?",
        data_dir.display()
    );
    let parent = args.file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = Dir::open(parent).with_context(|| format!("open {}", parent.display()))?;
    let name = args.file.file_name().and_then(|name| name.to_str()).context("name a file to write")?;
    let mut archive = Vec::new();
    let mut manifest = Manifest {
        version: 1,
        berth: env!("CARGO_PKG_VERSION").to_owned(),
        made: jiff::Timestamp::now(),
        files: BTreeMap::new(),
    };
    for (path, content) in &files {
        manifest.files.insert(path.clone(), berth_journal::checksum(content));
        append(&mut archive, path, content)?;
    }
    append(&mut archive, MANIFEST, &serde_json::to_vec_pretty(&manifest)?)?;
    archive.resize(archive.len() + 2 * BLOCK, 0);
    let mut file =
        directory.create_file(name, 0o600).with_context(|| format!("create {}", args.file.display()))?;
    file.write_all(&archive).and_then(|()| file.sync_all()).context("write the backup")?;
    directory.sync()?;
    println!("Wrote {} files, {} bytes, to {}.", files.len(), archive.len(), args.file.display());
    println!("It holds private keys. The data of volumes is not in it.");
    Ok(())
}

/// What belongs into a backup, by its path in the data directory.
fn collect(data_dir: &Path) -> anyhow::Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    // `berth up` keeps the API server in a directory of its own, `berth apiserver` is one.
    for root in [format!("{API}/"), String::new()] {
        add_journal(&mut files, data_dir, &format!("{root}{STORE}/{}", store::JOURNAL))?;
        let pki = data_dir.join(format!("{root}{PKI}"));
        if !pki.is_dir() {
            continue;
        }
        for entry in std::fs::read_dir(&pki).with_context(|| format!("read {}", pki.display()))? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                let name = entry.file_name().into_string().ok().context("a file's name is not text")?;
                let content = std::fs::read(entry.path()).with_context(|| format!("read {name}"))?;
                files.insert(format!("{root}{PKI}/{name}"), content);
            }
        }
    }
    for path in records_paths(data_dir) {
        add_journal(&mut files, data_dir, &path)?;
    }
    Ok(files)
}

/// Where drivers' records may be, of all nodes and of drivers that run once for all of them, in the data directory.
fn records_paths(data_dir: &Path) -> Vec<String> {
    let mut directories = vec![String::new(), format!("{}/", stack::CONTROLLERS)];
    for root in stack::nodes::roots(data_dir).iter().skip(1) {
        let name = root.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        directories.push(format!("{}/{name}/", stack::nodes::NODES));
    }
    let all =
        directories.iter().flat_map(|directory| BACKENDS.iter().map(move |backend| (directory, backend)));
    all.map(|(directory, backend)| format!("{directory}{}/{STATE}/{RECORDS}", backend.name)).collect()
}

/// Adds a journal that may be in use, and the file with its high-water mark.
fn add_journal(files: &mut BTreeMap<String, Vec<u8>>, data_dir: &Path, path: &str) -> anyhow::Result<()> {
    let journal = data_dir.join(path);
    let mark_path = format!("{path}.mark");
    for _ in 0..TRIES {
        if !journal.exists() {
            return Ok(());
        }
        let mark = std::fs::read(data_dir.join(&mark_path)).ok();
        let mut file = File::open(&journal).with_context(|| format!("open {}", journal.display()))?;
        let mut content = Vec::new();
        file.read_to_end(&mut content).with_context(|| format!("read {}", journal.display()))?;
        // A journal that was rewritten meanwhile gave the room of this copy back.
        let inode =
            |metadata: std::io::Result<std::fs::Metadata>| metadata.map(|metadata| metadata.ino()).ok();
        if inode(file.metadata()) != inode(std::fs::metadata(&journal)) {
            continue;
        }
        // Room that was written ahead.
        let end = content.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        content.truncate(end);
        files.insert(path.to_owned(), content);
        if let Some(mark) = mark {
            files.insert(mark_path, mark);
        }
        return Ok(());
    }
    bail!("{} is rewritten again and again; try again when less is written", journal.display())
}

/// Adds a file to a tar archive (ustar).
fn append(archive: &mut Vec<u8>, path: &str, content: &[u8]) -> anyhow::Result<()> {
    ensure!(path.len() <= 100, "the path {path} is too long for an archive");
    let mut header = [0u8; BLOCK];
    let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, path);
    put(100, "0000600\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{:011o}\0", content.len()));
    put(136, &format!("{:011o}\0", jiff::Timestamp::now().as_second().max(0)));
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    archive.extend_from_slice(&header);
    archive.extend_from_slice(content);
    archive.resize(archive.len().next_multiple_of(BLOCK), 0);
    Ok(())
}

/// Reads a backup, and refuses one that is not whole.
fn read(archive: &[u8]) -> anyhow::Result<(BTreeMap<String, Vec<u8>>, Manifest)> {
    let mut files = BTreeMap::new();
    let mut rest = archive;
    while let Some((header, content)) = rest.split_at_checked(BLOCK) {
        if header.iter().all(|byte| *byte == 0) {
            break;
        }
        let text = |at: usize, length: usize| {
            let field = header[at..at + length].split(|byte| *byte == 0).next().unwrap_or_default();
            std::str::from_utf8(field).map(|text| text.trim().to_owned())
        };
        let size = usize::from_str_radix(&text(124, 12)?, 8).context("a size in the archive")?;
        let file = content.get(..size).context("the backup is cut off")?;
        files.insert(text(0, 100)?, file.to_vec());
        rest = content.get(size.next_multiple_of(BLOCK)..).unwrap_or_default();
    }
    let manifest = files.remove(MANIFEST).context("this is no backup of Berth, or it is cut off")?;
    let manifest: Manifest = serde_json::from_slice(&manifest).context("read the backup's list of files")?;
    ensure!(manifest.version == 1, "the backup was made by a later version of Berth ({})", manifest.berth);
    for (path, checksum) in &manifest.files {
        let whole = files.get(path).is_some_and(|content| berth_journal::checksum(content) == *checksum);
        ensure!(whole, "the backup is damaged: {path}");
    }
    for path in files.keys() {
        let is_plain = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
        ensure!(is_plain && manifest.files.contains_key(path), "the backup holds an unexpected file: {path}");
    }
    Ok((files, manifest))
}

/// Restores a backup into a data directory where nothing runs.
pub(crate) fn restore(args: &RestoreArgs) -> anyhow::Result<()> {
    let archive = std::fs::read(&args.file).with_context(|| format!("read {}", args.file.display()))?;
    let (files, manifest) = read(&archive)?;
    let (data, _lock) = machine::take(&args.directory.data_dir)?;
    let now = jiff::Timestamp::now().as_second();
    let mut replaced = Vec::new();
    // What is there is moved aside, directory by directory, and never overwritten.
    let mut set_aside = |directory: &Path| -> anyhow::Result<()> {
        if directory.exists() {
            let aside = PathBuf::from(format!("{}.before-restore-{now}", directory.display()));
            std::fs::rename(directory, &aside)
                .with_context(|| format!("move {} aside", directory.display()))?;
            replaced.push(aside);
        }
        Ok(())
    };
    let mut kept = Vec::new();
    let mut stores = Vec::new();
    let mut directories: BTreeMap<&Path, Vec<&str>> = BTreeMap::new();
    for path in files.keys() {
        let directory = Path::new(path).parent().context("a file of the backup lies in no directory")?;
        directories.entry(directory).or_default().push(path);
    }
    for (directory, paths) in directories {
        let target = data.path().join(directory);
        let is_records = directory.ends_with(STATE);
        if is_records && !args.driver_records && has_records(&target) {
            kept.push(target);
            continue;
        }
        if is_records {
            for path in &paths {
                let present = data.path().join(path);
                if present.exists() {
                    let aside = PathBuf::from(format!("{}.before-restore-{now}", present.display()));
                    std::fs::rename(&present, &aside)?;
                }
            }
        } else {
            set_aside(&target)?;
        }
        let into = Dir::ensure(&target, 0o700)?;
        for path in paths {
            let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default();
            into.write_atomically(name, &files[path])?;
            std::fs::set_permissions(into.child_path(name), std::fs::Permissions::from_mode(0o600))?;
        }
        if is_records {
            // Data of volumes that these records do not know is kept, not removed.
            let note = "Records of this driver were restored from a backup. Remove this file when no data is missing.\n";
            into.ensure_dir(berth_journal::CORRUPT, 0o700)?
                .write_atomically(&format!("{RECORDS}-restored-{now}"), note.as_bytes())?;
        }
        if directory.ends_with(STORE) {
            stores.push(target);
        }
    }
    for directory in stores {
        // What clients remember of later revisions must not come again.
        store::skip_revisions(&directory).with_context(|| format!("open {}", directory.display()))?;
    }
    println!("Restored the backup of {} into {}.", manifest.made, data.path().display());
    for path in kept {
        println!("Kept the records in {}, which are newer (--driver-records replaces them).", path.display());
    }
    for path in replaced {
        println!("What was there is in {}; remove it when nothing is missing.", path.display());
    }
    println!("Start it with `berth up`. Volumes that no object knows: `berth adopt`.");
    Ok(())
}

/// Whether a driver has written down anything there.
fn has_records(state: &Path) -> bool {
    berth_journal::read(&state.join(RECORDS)).is_ok_and(|records| !records.is_empty())
}

/// What drivers of a data directory have written down about their volumes, by volume handle; without those of drivers that keep
/// nothing here.
pub(crate) fn driver_records(data_dir: &Path) -> BTreeMap<String, serde_json::Value> {
    let mut records = BTreeMap::new();
    for path in records_paths(data_dir) {
        let journal = data_dir.join(path);
        for (key, json) in berth_journal::read(&journal).unwrap_or_default() {
            if let Ok(record) = serde_json::from_slice(&json) {
                records.insert(key, record);
            }
        }
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_apiserver::store::{Change, Expect, Key, Store};

    fn key(name: &str) -> Key {
        Key::new("configmaps".into(), "default", name)
    }

    async fn put(store: &Store, name: &str) {
        let contents = |_| bytes::Bytes::from_static(b"{\"metadata\":{}}");
        store.write(key(name), Expect::Absent, Change::put(contents)).await.unwrap();
    }

    fn data_dir(path: &Path) -> machine::DataDirArg {
        machine::DataDirArg { data_dir: path.to_owned() }
    }

    #[tokio::test]
    async fn a_backup_of_a_store_in_use_is_restored_in_another_directory() {
        let (old, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (store, _) = Store::open(&old.path().join("apiserver/store"), store::Options::default()).unwrap();
        let pki = old.path().join("apiserver/pki");
        std::fs::create_dir_all(&pki).unwrap();
        std::fs::write(pki.join("ca.key"), "secret").unwrap();
        let state = Dir::ensure(&old.path().join("local/state"), 0o700).unwrap();
        let (mut journal, _) = berth_journal::Journal::open(&state, RECORDS, &mut |_, _| {}).unwrap();
        journal.write(&[berth_journal::Entry::Put { key: "vol-1", json: b"{\"size\":1}" }]).unwrap();
        journal.sync().unwrap();
        for index in 0..100 {
            put(&store, &format!("m{index}")).await;
        }
        let file = old.path().join("backup.tar");
        // While somebody writes.
        let writer = tokio::spawn({
            let store = store.clone();
            async move {
                for index in 0..200 {
                    put(&store, &format!("later{index}")).await;
                }
            }
        });
        let args = BackupArgs { directory: data_dir(old.path()), file: file.clone() };
        tokio::task::spawn_blocking(move || backup(&args)).await.unwrap().unwrap();
        writer.await.unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        let again = BackupArgs { directory: data_dir(old.path()), file: file.clone() };
        assert!(backup(&again).is_err(), "a backup is never overwritten");

        let args = RestoreArgs { directory: data_dir(new.path()), file: file.clone(), driver_records: false };
        restore(&args).unwrap();
        assert_eq!(std::fs::read(new.path().join("apiserver/pki/ca.key")).unwrap(), b"secret");
        assert_eq!(driver_records(new.path())["vol-1"]["size"], 1);
        let (restored, _) =
            Store::open(&new.path().join("apiserver/store"), store::Options::default()).unwrap();
        assert_eq!(restored.damage(), None);
        assert!((0..100).all(|index| restored.get(&key(&format!("m{index}"))).is_some()));
        assert!(restored.revision() > store.revision(), "no revision is given twice");
        drop(restored);

        // Again, over what is there: it is kept aside, and so are newer records.
        restore(&args).unwrap();
        let aside = |name: &str| {
            let entries = std::fs::read_dir(new.path().join("apiserver")).unwrap();
            entries
                .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(name))
                .count()
        };
        assert_eq!((aside("store."), aside("pki.")), (1, 1));
    }

    #[test]
    fn a_backup_that_is_damaged_or_cut_off_changes_nothing() {
        let mut archive = Vec::new();
        append(&mut archive, "apiserver/store/objects", b"berth-journal 2\n").unwrap();
        let manifest = Manifest {
            version: 1,
            berth: String::new(),
            made: jiff::Timestamp::UNIX_EPOCH,
            files: BTreeMap::from([(
                "apiserver/store/objects".to_owned(),
                berth_journal::checksum(b"berth-journal 2\n"),
            )]),
        };
        append(&mut archive, MANIFEST, &serde_json::to_vec(&manifest).unwrap()).unwrap();
        assert!(read(&archive).is_ok());
        assert!(read(&archive[..BLOCK * 2]).is_err());
        archive[BLOCK] ^= 1;
        assert!(read(&archive).is_err());
        let mut outside = Vec::new();
        append(&mut outside, "../objects", b"").unwrap();
        append(
            &mut outside,
            MANIFEST,
            &serde_json::to_vec(&Manifest { files: BTreeMap::new(), ..manifest }).unwrap(),
        )
        .unwrap();
        assert!(read(&outside).is_err());
    }
}
