//! Loop devices of the real kernel, over sparse files in a temporary directory.

use std::{
    io::{Read as _, Write as _},
    os::unix::fs::{FileExt as _, symlink},
};

use super::*;
use crate::mount::testing::{TestDirectory, is_detached};

const MIB: u64 = 1 << 20;

const AUTOCLEAR: Options = Options { read_only: false, direct_io: false, autoclear: true };

#[test]
fn an_autoclear_device_is_gone_when_it_is_dropped() {
    let directory = TestDirectory::new();
    let image = directory.image("image", MIB);
    let device = LoopDevice::attach(&image, AUTOCLEAR).unwrap();
    assert_eq!(size(device.path()).unwrap(), MIB);
    let seen = attached_to(&image).unwrap();
    assert_eq!(seen.len(), 1);
    assert_eq!((seen[0].number, seen[0].backing.as_path()), (device.number(), image.as_path()));
    assert!(seen[0].autoclear);
    drop(device);
    assert!(is_detached(&image));
}

#[test]
fn a_device_without_autoclear_stays_until_it_is_detached() {
    let directory = TestDirectory::new();
    let image = directory.image("image", MIB);
    let number = LoopDevice::attach(&image, Options::default()).unwrap().number();
    assert_eq!(attached_to(&image).unwrap().len(), 1);
    assert_eq!(detach(number).unwrap(), Change::Made);
    assert_eq!(attached_to(&image).unwrap(), []);
    assert_eq!(attached_below(&directory.path("")).unwrap(), []);
}

#[test]
fn detaching_what_is_not_attached_is_already_true() {
    assert_eq!(detach(1_000_000).unwrap(), Change::AlreadyTrue);
}

#[test]
fn detaching_a_device_in_use_is_busy_and_happens_with_its_last_user() {
    let directory = TestDirectory::new();
    let image = directory.image("image", MIB);
    let device = LoopDevice::attach(&image, Options::default()).unwrap();
    assert_eq!(detach(device.number()).unwrap_err().errno(), Some(libc::EBUSY));
    assert_eq!(attached_to(&image).unwrap().len(), 1);
    drop(device);
    assert!(is_detached(&image));
}

#[test]
fn a_device_is_found_by_the_file_after_it_was_renamed_or_linked() {
    let directory = TestDirectory::new();
    let image = directory.image("image", MIB);
    let other = directory.image("other", MIB);
    let device = LoopDevice::attach(&image, AUTOCLEAR).unwrap();
    fs::hard_link(&image, directory.path("link")).unwrap();
    fs::rename(&image, directory.path("renamed")).unwrap();
    fs::rename(&other, &image).unwrap();
    for name in ["link", "renamed"] {
        let found = attached_to(&directory.path(name)).unwrap();
        assert_eq!(found.iter().map(|found| found.number).collect::<Vec<_>>(), [device.number()], "{name}");
    }
    assert_eq!(attached_to(&image).unwrap(), []);
    assert_eq!(attached_to(&directory.path("missing")).unwrap(), []);
}

#[test]
fn a_number_is_opened_only_if_it_is_still_attached_to_the_image() {
    let directory = TestDirectory::new();
    let (image, other) = (directory.image("image", MIB), directory.image("other", MIB));
    let device = LoopDevice::attach(&image, AUTOCLEAR).unwrap();
    let number = device.number();
    let again = LoopDevice::open_if_attached(number, &image).unwrap().expect("it is attached");
    assert_eq!((again.number(), again.path()), (number, path_of(number).as_path()));
    for image in [&other, &directory.path("missing")] {
        assert!(LoopDevice::open_if_attached(number, image).unwrap().is_none());
    }
    drop(device);
    assert_eq!(attached_to(&image).unwrap().len(), 1, "the second holds it as well");
    drop(again);
    assert!(is_detached(&image));
    assert!(LoopDevice::open_if_attached(number, &image).unwrap().is_none());
}

#[test]
fn a_device_is_found_below_its_directory_even_when_the_file_is_deleted() {
    let directory = TestDirectory::new();
    let below = directory.dir("below");
    directory.dir("below-not");
    let image = directory.image("below/image", MIB);
    let _not = LoopDevice::attach(&directory.image("below-not/image", MIB), AUTOCLEAR).unwrap();
    let device = LoopDevice::attach(&image, AUTOCLEAR).unwrap();
    let link = directory.path("link");
    symlink(&below, &link).unwrap();
    fs::remove_file(&image).unwrap();
    for dir in [&below, &link] {
        let found = attached_below(dir).unwrap();
        assert_eq!(found.iter().map(|found| found.number).collect::<Vec<_>>(), [device.number()]);
        assert_eq!(found[0].backing, image);
    }
}

#[test]
fn a_read_only_device_refuses_writes() {
    let directory = TestDirectory::new();
    let image = directory.image("image", MIB);
    let device = LoopDevice::attach(&image, Options { read_only: true, ..AUTOCLEAR }).unwrap();
    let refused =
        OpenOptions::new().write(true).open(device.path()).map(|mut file| file.write(b"x").map(drop));
    assert!(!matches!(refused, Ok(Ok(()))), "{refused:?}");
}

#[test]
fn what_is_written_to_the_device_is_in_the_file() {
    let directory = TestDirectory::new();
    let image = directory.image("image", MIB);
    for direct_io in [false, true] {
        let device = LoopDevice::attach(&image, Options { direct_io, ..AUTOCLEAR }).unwrap();
        let file = OpenOptions::new().write(true).open(device.path()).unwrap();
        file.write_all_at(b"through the device", 8192).unwrap();
        file.sync_all().unwrap();
        let mut read = [0; 18];
        File::open(&image).unwrap().read_exact_at(&mut read, 8192).unwrap();
        assert_eq!(&read, b"through the device");
        File::create(&image).unwrap().set_len(MIB).unwrap();
    }
}

#[test]
fn direct_io_is_used_where_the_filesystem_can_and_given_up_where_it_cannot() {
    let directory = TestDirectory::new();
    // The temporary directory is on a filesystem with direct I/O; ramfs has none, on any kernel.
    let ramfs = directory.dir("ramfs");
    crate::mount::filesystem(Path::new("none"), &ramfs, "ramfs", crate::mount::Attributes::default(), &[])
        .unwrap();
    for (image, expected) in
        [(directory.image("image", MIB), true), (directory.image("ramfs/image", MIB), false)]
    {
        let device = LoopDevice::attach(&image, Options { direct_io: true, ..AUTOCLEAR }).unwrap();
        let status = ioctl::status(&File::open(device.path()).unwrap()).unwrap();
        assert_eq!(status.direct_io(), expected, "{}", image.display());
    }
}

#[test]
fn a_grown_file_is_seen_after_its_capacity_is_refreshed() {
    let directory = TestDirectory::new();
    let image = directory.image("image", MIB);
    let device = LoopDevice::attach(&image, AUTOCLEAR).unwrap();
    OpenOptions::new().write(true).open(&image).unwrap().set_len(3 * MIB).unwrap();
    assert_eq!(size(device.path()).unwrap(), MIB);
    refresh_capacity(device.number()).unwrap();
    assert_eq!(size(device.path()).unwrap(), 3 * MIB);
    assert_eq!(size(&image).unwrap(), 3 * MIB);
}

#[test]
fn read_ahead_is_what_it_was_set_to() {
    let directory = TestDirectory::new();
    let device = LoopDevice::attach(&directory.image("image", MIB), AUTOCLEAR).unwrap();
    for kb in [0, 4096] {
        set_read_ahead_kb(device.number(), kb).unwrap();
        assert_eq!(read_ahead_kb(device.number()).unwrap(), kb);
    }
}

#[test]
fn a_device_is_in_use_while_someone_claims_it() {
    let directory = TestDirectory::new();
    let image = directory.image("image", MIB);
    let device = LoopDevice::attach(&image, AUTOCLEAR).unwrap();
    assert!(!is_in_use(device.path()).unwrap());
    let claim = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device.path()).unwrap();
    assert!(is_in_use(device.path()).unwrap());
    drop(claim);
    assert_eq!(is_in_use(&image).unwrap_err().errno(), Some(libc::ENOTBLK));
}

#[test]
fn a_missing_device_node_is_made_again() {
    let directory = TestDirectory::new();
    let image = directory.image("image", MIB);
    let device = LoopDevice::attach(&image, AUTOCLEAR).unwrap();
    let aside = Path::new("/dev").join(format!("berth-test-{}", device.number()));
    fs::rename(device.path(), &aside).unwrap();
    let made = node(device.number());
    let same = made.as_ref().map(|path| fs::metadata(path).unwrap().rdev());
    let expected = fs::metadata(&aside).unwrap().rdev();
    fs::rename(&aside, device.path()).unwrap();
    assert_eq!(same.unwrap(), expected);
}

#[test]
fn many_at_once_all_get_a_device_of_their_own() {
    let directory = TestDirectory::new();
    let images: Vec<_> = (0..12).map(|i| directory.image(&format!("image-{i}"), MIB)).collect();
    let devices = thread::scope(|scope| {
        let attaching: Vec<_> = images
            .iter()
            .map(|image| scope.spawn(|| LoopDevice::attach(image, AUTOCLEAR).unwrap()))
            .collect();
        attaching.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let mut numbers: Vec<_> = devices.iter().map(LoopDevice::number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), images.len());
    for (image, device) in images.iter().zip(&devices) {
        assert_eq!(attached_to(image).unwrap()[0].number, device.number());
        let mut first = [1; 1];
        File::open(device.path()).unwrap().read_exact(&mut first).unwrap();
        assert_eq!(first, [0]);
    }
}

#[test]
fn an_image_behind_a_symbolic_link_is_refused() {
    let directory = TestDirectory::new();
    let link = directory.path("link");
    symlink(directory.image("image", MIB), &link).unwrap();
    assert_eq!(LoopDevice::attach(&link, AUTOCLEAR).unwrap_err().errno(), Some(libc::ELOOP));
}
