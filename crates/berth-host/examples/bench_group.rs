//! Measures how a volume of many files comes to a pod's fsGroup: by changing every file, by looking at every file, and by a
//! mount that shows the files as the group's.
//!
//! `bench_group DIRECTORY [FILES]`: DIRECTORY is made, filled with FILES (a million unless given) empty files, and removed again.
#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made ends")]

use std::{
    fs::{self, File},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    time::Instant,
};

use berth_host::{
    mount::{self, Attributes},
    ownership::{GroupPolicy, apply_group, give_to_group},
    path::{Dir, remove_tree},
    user_namespace::UserNamespace,
};

const IN_A_DIRECTORY: u32 = 1000;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let directory =
        PathBuf::from(arguments.next().expect("the first argument is a directory that does not exist yet"));
    let files: u32 = arguments.next().map_or(1_000_000, |number| number.parse().unwrap());
    fs::create_dir(&directory).unwrap();
    let volume = directory.join("volume");
    fs::create_dir(&volume).unwrap();
    timed(&format!("make {files} files"), || {
        for number in 0..files {
            let below = volume.join((number / IN_A_DIRECTORY).to_string());
            if number % IN_A_DIRECTORY == 0 {
                fs::create_dir(&below).unwrap();
            }
            File::create(below.join(number.to_string())).unwrap();
        }
        synced(&volume);
    });
    println!("fsGroup by the kubelet's rules:");
    let apply = |gid, policy| {
        apply_group(&Dir::open(&volume).unwrap(), gid, policy, false).unwrap();
        synced(&volume);
    };
    timed("  first pod, all files change", || {
        apply(4000, GroupPolicy::Always);
    });
    timed("  next pod of the same group, Always: all files are looked at", || {
        apply(4000, GroupPolicy::Always);
    });
    timed("  next pod of the same group, OnRootMismatch", || {
        apply(4000, GroupPolicy::OnRootMismatch);
    });
    timed("  pod of another group, OnRootMismatch: all files change", || {
        apply(4001, GroupPolicy::OnRootMismatch);
    });
    println!("by the mount (--group-by-mount):");
    let show = |gid: u32| {
        let target = directory.join(gid.to_string());
        fs::create_dir(&target).unwrap();
        mount::bind(&volume, &target, Attributes::default()).unwrap();
        let top = Dir::open(&volume).unwrap();
        let own = top.group().unwrap();
        give_to_group(&top, own).unwrap();
        let namespace = UserNamespace::exchanging_groups(own, gid).unwrap();
        mount::map_ids_at(&target, namespace.as_fd()).unwrap();
        target
    };
    let mut targets = Vec::new();
    timed("  pod of another group", || targets.push(show(4002)));
    timed("  one more beside it, of yet another group", || targets.push(show(4003)));
    for target in targets {
        let _ = mount::unmount(&target).unwrap();
    }
    remove_tree(&directory).unwrap();
}

fn synced(path: &Path) {
    rustix::fs::syncfs(File::open(path).unwrap()).unwrap();
}

fn timed(what: &str, work: impl FnOnce()) {
    let begun = Instant::now();
    work();
    println!("{what:<64} {:>10.1} ms", begun.elapsed().as_secs_f64() * 1000.0);
}
