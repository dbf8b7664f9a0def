//! Which block device a disk is: by the name that udev gives it, or by the serial that the disk itself says.
//!
//! A device is never guessed. A name counts only as a whole, two devices that both claim to be the disk are an error, and what
//! is not there yet is waited for.

use std::{
    fs, io,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::Deadline;
use crate::{Error, Result, blocking};

/// How often is looked for a device that is not there yet. Its appearance would be an event of udev's directory, but not
/// every name of it is there, and a look costs one readlink.
const LOOK: Duration = Duration::from_millis(100);
const LOOK_LATER: Duration = Duration::from_millis(500);
/// A device that is not there after so long is reported, and looked for again by the next call.
const LONGEST: Duration = Duration::from_secs(60);

/// What a disk is known by on the machine that it is attached to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskNames {
    /// The names that its link may have in udev's directory, the usual one first.
    pub(crate) links: Vec<String>,
    /// What every other name of it ends with: its serial, or its volume's name.
    pub(crate) ending: String,
    /// What stands before that ending in a name.
    pub(crate) boundary: Vec<char>,
    /// What the disk says of itself.
    pub(crate) identity: Identity,
}

/// What a disk says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Identity {
    /// The serial of a virtio or NVMe disk.
    Serial(String),
    /// The vendor, the model, and the designator of a SCSI disk, as its vital product data have them.
    Scsi { vendor: String, model: String, designator: String },
}

/// Where devices are looked for.
#[derive(Debug, Clone)]
pub(crate) struct Finder {
    /// Links to devices, by their ids.
    pub(crate) links: PathBuf,
    /// A directory for each block device, with what it says of itself.
    pub(crate) blocks: PathBuf,
    /// A SCSI device counts only once the kernel says that it is running.
    pub(crate) must_run: bool,
}

impl Finder {
    /// Devices of this machine, with links in that directory.
    pub(crate) fn new(links: PathBuf, must_run: bool) -> Self {
        Self { links, blocks: "/sys/block".into(), must_run }
    }

    /// The device, waited for until the deadline if it is not there yet.
    pub(crate) async fn wait(&self, wanted: &DiskNames, deadline: Deadline) -> Result<PathBuf> {
        let end = Deadline::after(deadline.left(LONGEST));
        for look in 0u32.. {
            let (finder, what) = (self.clone(), wanted.clone());
            if let Some(device) = blocking(move || finder.find(&what)).await? {
                return Ok(device);
            }
            if end.is_over() {
                break;
            }
            tokio::time::sleep(if look < 20 { LOOK } else { LOOK_LATER }).await;
        }
        let links: Vec<String> =
            wanted.links.iter().map(|link| self.links.join(link).display().to_string()).collect();
        Err(Error::Unavailable(format!(
            "the disk is attached, but its device has not appeared on this node: there is no {}, and no block device \
             that says it is {:?}",
            links.join(" or "),
            wanted.ending
        )))
    }

    /// The device, if it is there now.
    pub(crate) fn find(&self, wanted: &DiskNames) -> Result<Option<PathBuf>> {
        for link in &wanted.links {
            if let Some(device) = self.device(&self.links.join(link))? {
                return Ok(Some(device));
            }
        }
        let mut found = Vec::new();
        for name in names(&self.links)? {
            if is_ending(&name, wanted)
                && let Some(device) = self.device(&self.links.join(&name))?
            {
                found.push(device);
            }
        }
        for name in names(&self.blocks)? {
            if self.says(&name, &wanted.identity)
                && let Some(device) = self.device(&Path::new("/dev").join(&name))?
            {
                found.push(device);
            }
        }
        found.sort();
        found.dedup();
        match found.len() {
            0 | 1 => Ok(found.pop()),
            _ => Err(Error::Precondition(format!(
                "{} block devices claim to be {:?}: {}; none is used",
                found.len(),
                wanted.ending,
                found.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
            ))),
        }
    }

    /// Where a link leads, if to a block device that can be used.
    fn device(&self, link: &Path) -> Result<Option<PathBuf>> {
        let path = match fs::canonicalize(link) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            path => {
                path.map_err(|error| berth_host::Error::new(format!("follow {}", link.display()), error))?
            }
        };
        let is_block = fs::metadata(&path).is_ok_and(|metadata| metadata.file_type().is_block_device());
        Ok((is_block && self.is_running(&path)).then_some(path))
    }

    fn is_running(&self, device: &Path) -> bool {
        let Some(name) = device.file_name().filter(|_| self.must_run) else { return true };
        // Only SCSI devices have a state.
        text(&self.blocks.join(name).join("device/state")).is_none_or(|state| state == "running")
    }

    fn says(&self, name: &str, identity: &Identity) -> bool {
        let block = self.blocks.join(name);
        match identity {
            Identity::Serial(serial) => ["serial", "device/serial"]
                .iter()
                .any(|file| text(&block.join(file)).as_ref() == Some(serial)),
            Identity::Scsi { vendor, model, designator } => {
                text(&block.join("device/vendor")).as_ref() == Some(vendor)
                    && text(&block.join("device/model")).as_ref() == Some(model)
                    && fs::read(block.join("device/vpd_pg83"))
                        .is_ok_and(|page| designators(&page).any(|found| found == designator.as_bytes()))
            }
        }
    }
}

/// Whether a link's name is another one of the disk: its ending as a whole, and not a partition of it.
fn is_ending(name: &str, wanted: &DiskNames) -> bool {
    name.strip_suffix(wanted.ending.as_str())
        .is_some_and(|before| before.ends_with(wanted.boundary.as_slice()))
}

/// The names in a directory; none if there is no directory.
fn names(directory: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => {
            entries.map_err(|error| berth_host::Error::new(format!("list {}", directory.display()), error))?
        }
    };
    Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

fn text(file: &Path) -> Option<String> {
    fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
}

/// The designators of the page of device identification (SPC-4, 7.8.6), without the padding at their ends.
fn designators(page: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = match page {
        [_, 0x83, high, low, rest @ ..] => {
            &rest[..rest.len().min(usize::from(u16::from_be_bytes([*high, *low])))]
        }
        _ => &[],
    };
    std::iter::from_fn(move || {
        let [_, _, _, length, after @ ..] = rest else { return None };
        let length = usize::from(*length).min(after.len());
        rest = &after[length..];
        Some(after[..length].trim_ascii_end())
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn wanted(name: &str) -> DiskNames {
        DiskNames {
            links: vec![format!("scsi-0DO_Volume_{name}")],
            ending: name.to_owned(),
            boundary: vec!['_'],
            identity: Identity::Scsi {
                vendor: "DO".to_owned(),
                model: "Volume".to_owned(),
                designator: name.to_owned(),
            },
        }
    }

    /// Block devices that exist, to point at.
    fn some_devices() -> Vec<PathBuf> {
        let mut devices: Vec<PathBuf> = fs::read_dir("/sys/block")
            .unwrap()
            .flatten()
            .map(|entry| Path::new("/dev").join(entry.file_name()))
            .filter(|path| path.exists())
            .collect();
        devices.sort();
        assert!(devices.len() >= 2, "this machine has fewer than two block devices");
        devices
    }

    fn finder(dir: &Path) -> Finder {
        let finder = Finder { links: dir.join("by-id"), blocks: dir.join("block"), must_run: true };
        fs::create_dir(&finder.links).unwrap();
        fs::create_dir(&finder.blocks).unwrap();
        finder
    }

    #[test]
    fn a_device_is_found_by_its_name_by_another_name_or_by_its_serial_and_never_by_a_part() {
        let (dir, devices) = (tempfile::tempdir().unwrap(), some_devices());
        let finder = finder(dir.path());
        let find = |wanted: &DiskNames| finder.find(wanted).unwrap();
        assert_eq!(find(&wanted("data")), None);
        // Names of other volumes, of a partition, and a link to what is no device.
        for name in ["scsi-0DO_Volume_my-data", "scsi-0DO_Volume_data2", "scsi-0DO_Volume_data-part1"] {
            symlink(&devices[1], finder.links.join(name)).unwrap();
        }
        symlink("/etc/hostname", finder.links.join("scsi-1DO_Volume_data")).unwrap();
        symlink("/nowhere", finder.links.join("scsi-2DO_Volume_data")).unwrap();
        assert_eq!(find(&wanted("data")), None);
        symlink(&devices[0], finder.links.join("scsi-SDO_Volume_data")).unwrap();
        assert_eq!(find(&wanted("data")).as_ref(), Some(&devices[0]));
        symlink(&devices[1], finder.links.join("scsi-0DO_Volume_data")).unwrap();
        assert_eq!(find(&wanted("data")).as_ref(), Some(&devices[1]), "the usual name comes first");

        let serial = DiskNames {
            links: vec!["virtio-bp1abc".to_owned()],
            ending: "bp1abc".to_owned(),
            boundary: vec!['-', '_'],
            identity: Identity::Serial("bp1abc".to_owned()),
        };
        assert_eq!(find(&serial), None);
        for (device, file, text) in [(0, "serial", "bp1abc\n"), (1, "device/serial", "xbp1abc ")] {
            let file = finder.blocks.join(devices[device].file_name().unwrap()).join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        assert_eq!(find(&serial).as_ref(), Some(&devices[0]));
        fs::write(finder.blocks.join(devices[1].file_name().unwrap()).join("device/serial"), "bp1abc ")
            .unwrap();
        let said = finder.find(&serial).unwrap_err().to_string();
        assert!(said.contains("2 block devices claim"), "{said}");
    }

    #[test]
    fn a_scsi_disk_is_known_by_its_vital_product_data_and_used_when_it_runs() {
        let (dir, devices) = (tempfile::tempdir().unwrap(), some_devices());
        let finder = finder(dir.path());
        let device = finder.blocks.join(devices[0].file_name().unwrap()).join("device");
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("vendor"), "DO      \n").unwrap();
        fs::write(device.join("model"), "Volume          \n").unwrap();
        // A designator of NAA, then one of the vendor, padded.
        let mut page = vec![0, 0x83, 0, 24];
        page.extend([1, 3, 0, 8, 0x60, 1, 2, 3, 4, 5, 6, 7]);
        page.extend([2, 0, 0, 8]);
        page.extend(b"data    ");
        fs::write(device.join("vpd_pg83"), &page).unwrap();
        fs::write(device.join("state"), "created\n").unwrap();
        assert_eq!(finder.find(&wanted("data")).unwrap(), None);
        fs::write(device.join("state"), "running\n").unwrap();
        assert_eq!(finder.find(&wanted("data")).unwrap().as_ref(), Some(&devices[0]));
        assert_eq!(finder.find(&wanted("dat")).unwrap(), None);
        for broken in [&page[..3], &page[..20], &[0, 0x83, 255, 255, 1, 1, 1, 200, 1], &[]] {
            assert!(designators(broken).all(|found| found != b"data"), "{broken:?}");
        }
    }

    #[tokio::test]
    async fn a_device_that_comes_late_is_waited_for_and_one_that_never_comes_is_named() {
        let (dir, devices) = (tempfile::tempdir().unwrap(), some_devices());
        let finder = finder(dir.path());
        let wait = |time| {
            let finder = finder.clone();
            async move { finder.wait(&wanted("data"), Deadline::after(time)).await }
        };
        let error = wait(Duration::from_millis(300)).await.unwrap_err();
        assert!(
            matches!(&error, Error::Unavailable(said) if said.contains("scsi-0DO_Volume_data")),
            "{error}"
        );
        let waiting = tokio::spawn(wait(Duration::from_secs(60)));
        symlink(&devices[0], finder.links.join("scsi-0DO_Volume_data")).unwrap();
        assert_eq!(waiting.await.unwrap().unwrap(), devices[0]);
    }
}
