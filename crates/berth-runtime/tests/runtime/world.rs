//! What a container sees: files, volumes, devices, names, users.

use std::{fs, os::unix::fs::symlink, path::Path};

use berth_host::loopdev::{self, LoopDevice};
use berth_runtime::{Device, Propagation, Reason, Runtime as _, Security};

use crate::scratch::{Scratch, exit, mount};

#[tokio::test]
async fn data_goes_through_volumes_and_a_read_only_one_refuses_writes() {
    let scratch = Scratch::new();
    let (input, output) = (scratch.dir("input"), scratch.dir("output"));
    fs::write(input.join("a"), "data").unwrap();
    let mut spec = scratch.sh("cp /in/a /deep/er/out/b; (echo x > /in/c) 2>&1 || echo refused; cat /file");
    spec.mounts = vec![
        mount(&input, "/in", true),
        mount(&output, "/deep/er/out", false),
        mount(&input.join("a"), "/file", false),
    ];
    let (printed, exited) = scratch.run(&scratch.open(), spec).await;
    assert_eq!(exited.code, 0, "{printed}");
    assert!(printed.contains("Read-only file system") && printed.contains("refused\ndata"), "{printed}");
    assert_eq!(fs::read_to_string(output.join("b")).unwrap(), "data");
    assert!(!input.join("c").exists());
}

#[tokio::test]
async fn a_volume_in_a_volume_is_there_whatever_their_order() {
    let scratch = Scratch::new();
    let (outer, inner) = (scratch.dir("outer/inner"), scratch.dir("other"));
    fs::write(inner.join("seen"), "").unwrap();
    let mut spec = scratch.sh("ls /data/inner");
    spec.mounts = vec![mount(&inner, "/data/inner", false), mount(outer.parent().unwrap(), "/data", false)];
    assert_eq!(scratch.run(&scratch.open(), spec).await.0, "seen");
}

#[tokio::test]
async fn nothing_on_the_host_changes() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let (mark, full) = (scratch.path("mark"), scratch.dir("full"));
    fs::create_dir(full.join("directory")).unwrap();
    fs::write(full.join("directory/file"), "kept").unwrap();
    let (mark, removed) = (mark.display(), full.display());
    let mut spec = scratch.sh(&format!(
        "echo changed > {mark} && echo x > /etc/berth-test && rm /etc/passwd && rm -r {removed} && mkdir /berth-test && \
         hostname other && mount -t tmpfs none /mnt && touch /mnt/x && echo done"
    ));
    spec.security = Security::privileged();
    let (printed, exited) = scratch.run(&runtime, spec).await;
    assert_eq!((printed.as_str(), exited.code), ("done", 0));
    assert!(!scratch.path("mark").exists() && !Path::new("/etc/berth-test").exists());
    assert!(Path::new("/etc/passwd").exists());
    assert_eq!(fs::read_to_string(full.join("directory/file")).unwrap(), "kept");
    assert!(!Path::new("/berth-test").exists() && !Path::new("/mnt/x").exists());
    assert_ne!(fs::read_to_string("/proc/sys/kernel/hostname").unwrap(), "other\n");
    let (printed, _) = scratch.run(&runtime, scratch.sh("ls /etc/berth-test /etc/passwd 2>&1")).await;
    assert!(
        printed.contains("/etc/berth-test': No such file") && printed.ends_with("/etc/passwd"),
        "{printed}"
    );
}

#[tokio::test]
async fn a_container_has_its_own_processes_names_and_environment() {
    let scratch = Scratch::new();
    let mut spec =
        scratch.sh("echo $$; set -- /proc/[0-9]*; echo $#; hostname; cat /etc/hostname; env | sort; pwd");
    spec.hostname = "web-0".into();
    spec.env.push(("GREETING".into(), "hello there".into()));
    spec.working_dir = Some("/not/there/yet".into());
    let (printed, _) = scratch.run(&scratch.open(), spec).await;
    let expected =
        "2\n2\nweb-0\nweb-0\nGREETING=hello there\nPATH=/usr/bin:/bin\nPWD=/not/there/yet\n/not/there/yet";
    assert_eq!(printed, expected);
}

#[tokio::test]
async fn a_container_runs_as_the_user_that_is_asked_for() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let mut spec =
        scratch.sh("id -u; id -g; id -G; echo via /dev > /dev/stdout; echo bye > /dev/termination-log");
    (spec.user, spec.group, spec.groups) = (Some(1234), Some(2345), vec![3456, 4567]);
    let (printed, exited) = scratch.run(&runtime, spec).await;
    assert_eq!(printed, "1234\n2345\n2345 3456 4567\nvia /dev");
    assert_eq!(exited.message, "bye\n");
    let (printed, _) = scratch.run(&runtime, scratch.sh("id -u; id -G; umask")).await;
    assert_eq!(printed, "0\n0\n0022");
}

#[tokio::test]
async fn a_container_has_the_usual_devices_and_a_read_only_sys() {
    let scratch = Scratch::new();
    let spec = scratch.sh(
        "for d in null zero full random urandom tty; do test -c /dev/$d || echo no $d; done; \
         echo x > /dev/null; head -c 3 /dev/zero | wc -c; test -d /dev/shm && touch /dev/shm/x; readlink /dev/ptmx; \
         ls /dev/fd/ > /dev/null; ls /sys/block > /dev/null; touch /sys/x 2>/dev/null || echo no; ls /dev | grep -c loop",
    );
    assert_eq!(scratch.run(&scratch.open(), spec).await.0, "3\npts/ptmx\nno\n0");
}

#[tokio::test]
async fn no_way_leads_out_through_what_process_1_has_open() {
    let scratch = Scratch::new();
    let mut spec = scratch.sh("for fd in /proc/1/fd/*; do echo $(ls $fd/ $fd/.. 2>/dev/null); done");
    // Without capabilities that process 1 has, its descriptors cannot even be listed.
    spec.security = Security::privileged();
    let name = spec.log.file_name().unwrap().to_string_lossy().into_owned();
    let (printed, _) = scratch.run(&scratch.open(), spec).await;
    assert!(printed.contains(&name), "the directory of the log is open: {printed}");
    assert!(!printed.contains("containers"), "{printed}");
}

#[tokio::test]
async fn hidden_directories_are_empty() {
    let scratch = Scratch::new();
    let secret = scratch.dir("secret");
    fs::write(secret.join("key"), "").unwrap();
    let shown = scratch.dir("secret/volume");
    let mut spec =
        scratch.sh(&format!("ls {0}; touch {0}/x 2>&1 || echo refused; ls /data", secret.display()));
    spec.hidden = vec![secret.clone(), "/there/is/no/such/directory".into()];
    fs::write(shown.join("visible"), "").unwrap();
    spec.mounts = vec![mount(&shown, "/data", false)];
    let (printed, _) = scratch.run(&scratch.open(), spec).await;
    assert!(printed.ends_with("refused\nvisible") && !printed.contains("key"), "{printed}");
}

#[tokio::test]
async fn a_read_only_root_leaves_volumes_and_dev_writable() {
    let scratch = Scratch::new();
    let volume = scratch.dir("volume");
    let mut spec = scratch.sh("cat /proc/self/mountinfo > /data/mounts
         touch /data/x /dev/shm/x || exit 7
         touch /tmp/x 2> /data/said");
    spec.read_only_root = true;
    spec.mounts = vec![mount(&volume, "/data", false)];
    let (printed, exited) = scratch.run(&scratch.open(), spec).await;
    let written = |name: &str| fs::read_to_string(volume.join(name)).unwrap_or_default();
    let (said, mounts) = (written("said"), written("mounts"));
    assert!(
        exited.code == 1 && said.contains("Read-only file system"),
        "{exited:?} {printed} {said}\n{mounts}"
    );
    assert!(volume.join("x").exists());
}

#[tokio::test]
async fn symbolic_links_do_not_lead_a_mount_out_of_the_container() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let (volume, other, target) = (scratch.dir("volume"), scratch.dir("other"), scratch.dir("target"));
    fs::write(other.join("mark"), "").unwrap();
    // In the volume: an absolute link, and one that climbs. Both are taken from the container's root.
    symlink(&target, volume.join("absolute")).unwrap();
    symlink("../../../../../../../../climbed", volume.join("climbing")).unwrap();
    let mut spec = scratch.sh(&format!("ls {} /climbed; sleep 100", target.display()));
    spec.mounts = vec![
        mount(&volume, "/data", false),
        mount(&other, "/data/absolute", false),
        mount(&other, "/climbed", false),
    ];
    let log = spec.log.clone();
    let id = runtime.start(spec).await.unwrap();
    crate::scratch::until("it prints", || {
        crate::scratch::texts(&log).iter().filter(|line| *line == "mark").count() == 2
    })
    .await;
    assert!(fs::read_dir(&target).unwrap().next().is_none() && !Path::new("/climbed").exists());
    runtime.stop(&id, std::time::Duration::ZERO).await;

    // On the host: a source that is a link is refused.
    symlink("/etc", scratch.path("link")).unwrap();
    let mut spec = scratch.sh("true");
    spec.mounts = vec![mount(&scratch.path("link"), "/data", false)];
    let (_, exited) = scratch.run(&runtime, spec).await;
    assert_eq!((exited.reason, exited.code), (Reason::StartError, 128));
    assert!(
        exited.message.contains("bind") && exited.message.contains("symbolic links"),
        "{}",
        exited.message
    );
}

#[tokio::test]
async fn a_block_device_appears_where_it_is_wanted() {
    let scratch = Scratch::new();
    let image = scratch.path("image");
    fs::write(&image, "block".repeat(1 << 18)).unwrap();
    let device =
        LoopDevice::attach(&image, loopdev::Options { autoclear: true, ..Default::default() }).unwrap();
    let runtime = scratch.open();
    let mut spec =
        scratch.sh("head -c 5 /dev/xvda; echo; test -b /some/where && echo yes; printf hello > /dev/xvda");
    let at = |target: &str| Device { source: device.path().into(), target: target.into(), read_only: false };
    spec.devices = vec![at("/dev/xvda"), at("/some/where")];
    let (printed, exited) = scratch.run(&runtime, spec).await;
    assert_eq!((printed.as_str(), exited.code), ("block\nyes", 0));
    let mut spec = scratch.sh("head -c 5 /dev/xvda");
    spec.devices = vec![at("/dev/xvda")];
    assert_eq!(scratch.run(&runtime, spec).await.0, "hello");
    let mut spec = scratch.sh("true");
    spec.devices = vec![Device { source: image, target: "/dev/xvda".into(), read_only: false }];
    let (_, exited) = scratch.run(&runtime, spec).await;
    assert!(exited.message.contains("use as a device"), "{}", exited.message);

    // In a volume nothing is made or replaced, but what is the device already is taken.
    let volume = scratch.dir("volume");
    fs::write(volume.join("there"), "kept").unwrap();
    for (target, starts) in [("/v/new", false), ("/v/there", false), ("/host", true)] {
        let mut spec = scratch.sh("true");
        spec.mounts = vec![mount(&volume, "/v", false)];
        let target = if starts {
            spec.mounts.push(mount(Path::new("/dev"), "/host", true));
            format!("/host/{}", device.path().file_name().unwrap().to_string_lossy())
        } else {
            target.to_owned()
        };
        spec.devices = vec![at(&target)];
        let (_, exited) = scratch.run(&runtime, spec).await;
        assert_eq!(exited.code == 0, starts, "{target}: {}", exited.message);
        assert_eq!(exited.message.contains("it lies in a volume"), !starts, "{}", exited.message);
    }
    let left: Vec<_> = fs::read_dir(&volume).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["there"]);
    assert_eq!(fs::read_to_string(volume.join("there")).unwrap(), "kept");
}

#[tokio::test]
async fn a_volume_at_etc_stays_as_it_is() {
    let scratch = Scratch::new();
    let etc = scratch.dir("etc");
    fs::write(etc.join("hostname"), "the host\n").unwrap();
    let mut spec = scratch.sh("cat /etc/hostname; hostname");
    spec.hostname = "web-0".into();
    spec.mounts = vec![mount(&etc, "/etc", false)];
    let (printed, _) = scratch.run(&scratch.open(), spec).await;
    assert_eq!(printed, "the host\nweb-0");
    let left: Vec<_> = fs::read_dir(&etc).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["hostname"]);
    assert_eq!(fs::read_to_string(etc.join("hostname")).unwrap(), "the host\n");
}

#[tokio::test]
async fn mounts_made_later_on_the_host_are_seen_as_propagation_says() {
    let scratch = Scratch::new();
    let shared = scratch.dir("shared");
    let run = |arguments: &[&str]| {
        let done = std::process::Command::new("mount").args(arguments).arg(&shared).status().unwrap();
        assert!(done.success());
    };
    run(&["-t", "tmpfs", "berth-test"]);
    let _unmount = Unmount(&shared);
    run(&["--make-shared"]);
    fs::create_dir(shared.join("later")).unwrap();
    let runtime = scratch.open();
    let mut spec = scratch.sh("until test -e /slave/later/x; do sleep 0.01; done; ls /private/later | wc -l");
    spec.mounts = vec![mount(&shared, "/slave", false), mount(&shared, "/private", false)];
    spec.mounts[1].propagation = Propagation::None;
    let log = spec.log.clone();
    let id = runtime.start(spec).await.unwrap();
    let later = shared.join("later");
    let mounted =
        std::process::Command::new("mount").args(["-t", "tmpfs", "berth-test"]).arg(&later).status();
    assert!(mounted.unwrap().success());
    fs::write(later.join("x"), "").unwrap();
    assert_eq!(exit(&runtime, &id).await.code, 0);
    assert_eq!(crate::scratch::texts(&log), ["0"]);

    let mut spec = scratch.sh("mount -t tmpfs none /both/later && echo x > /both/later/y");
    spec.mounts = vec![mount(&shared, "/both", false)];
    spec.mounts[0].propagation = Propagation::Bidirectional;
    spec.security = Security::privileged();
    assert_eq!(scratch.run(&runtime, spec).await.1.code, 0);
    assert!(later.join("y").exists(), "what the container mounted is on the host");
}

struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").args(["-R", "-l"]).arg(self.0).status();
    }
}
