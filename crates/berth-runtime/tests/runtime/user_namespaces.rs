//! Containers with a user namespace: root inside is nobody outside, and files look as they do without one.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown},
    path::Path,
};

use berth_runtime::{ContainerSpec, ExecCall, IdRange, Reason, Runtime as _, Security};
use tokio::io::AsyncReadExt as _;

use crate::scratch::{Scratch, mount};

const RANGE: IdRange = IdRange { first: 1_900_000_000, count: 65_536 };

fn sh(scratch: &Scratch, script: &str) -> ContainerSpec {
    ContainerSpec { user_namespace: Some(RANGE), ..scratch.sh(script) }
}

#[tokio::test]
async fn root_of_a_container_is_another_user_of_the_machine_and_owns_its_files() {
    let scratch = Scratch::new();
    let script = "cat /proc/self/uid_map /proc/self/gid_map | tr -s ' '; id -u; id -G; stat -c %u:%g / /etc /etc/hostname \
         /dev /dev/null /usr/bin/env /made; touch /etc/new && stat -c %u /etc/new; grep CapEff /proc/self/status; \
         kill -0 1 2>/dev/null || echo process 1 is not ours; ls /proc/1/root >/dev/null 2>&1 || echo nor its root";
    let mut spec = sh(&scratch, script);
    spec.working_dir = Some("/made".into());
    let (printed, exited) = scratch.run(&scratch.open(), spec).await;
    let ids = " 0 1900000000 65536\n 0 1900000000 65536\n0\n0";
    let files = "0:0\n".repeat(7);
    let expected = format!("{ids}\n{files}0\nCapEff:\t00000000a00425fb\nprocess 1 is not ours\nnor its root");
    assert_eq!(printed, expected, "{exited:?}");
}

#[tokio::test]
async fn files_in_volumes_keep_the_ids_that_the_container_sees() {
    let scratch = Scratch::new();
    let (volume, inner) = (scratch.dir("volume"), scratch.dir("inner"));
    fs::write(volume.join("old"), "").unwrap();
    chown(volume.join("old"), Some(1000), Some(2000)).unwrap();
    fs::write(volume.join("private"), "").unwrap();
    fs::set_permissions(volume.join("private"), fs::Permissions::from_mode(0o600)).unwrap();
    let runtime = scratch.open();
    let mut spec = sh(
        &scratch,
        "stat -c %u:%g /data/old; touch /data/root /data/place/in; chown 7:8 /data/root; cat /data/private && echo read; echo bye > /dev/termination-log",
    );
    spec.mounts = vec![mount(&volume, "/data", false), mount(&inner, "/data/place", false)];
    let (printed, exited) = scratch.run(&runtime, spec).await;
    assert_eq!((printed.as_str(), exited.code, exited.message.as_str()), ("1000:2000\nread", 0, "bye\n"));
    let owner = |path: &Path| fs::metadata(path).map(|found| (found.uid(), found.gid())).unwrap();
    assert_eq!(owner(&volume.join("root")), (7, 8));
    // The directory that a volume in a volume is mounted at was made on the way, by root of the container.
    assert_eq!((owner(&volume.join("place")), owner(&inner.join("in"))), ((0, 0), (0, 0)));

    let mut spec = sh(
        &scratch,
        "id -u; id -G; touch /data/mine; test -w /data/private || echo refused; echo via > /dev/stdout; echo bye > /dev/termination-log",
    );
    (spec.user, spec.group, spec.groups) = (Some(1234), Some(2345), vec![3456]);
    fs::set_permissions(&volume, fs::Permissions::from_mode(0o777)).unwrap();
    spec.mounts = vec![mount(&volume, "/data", false)];
    let (printed, exited) = scratch.run(&runtime, spec).await;
    assert_eq!(printed, "1234\n2345 3456\nrefused\nvia");
    assert_eq!(exited.message, "bye\n");
    assert_eq!(owner(&volume.join("mine")), (1234, 2345));
}

#[tokio::test]
async fn a_sub_path_is_made_by_root_of_the_container() {
    let scratch = Scratch::new();
    let volume = scratch.dir("volume");
    let mut spec = sh(&scratch, "stat -c %u /data; touch /data/x");
    spec.mounts = vec![mount(&volume, "/data", false)];
    spec.mounts[0].sub_path = Some("deep/er".into());
    assert_eq!(scratch.run(&scratch.open(), spec).await.0, "0");
    assert_eq!(fs::metadata(volume.join("deep/er/x")).unwrap().uid(), 0);
}

#[tokio::test]
async fn what_is_allowed_inside_reaches_nothing_outside() {
    let scratch = Scratch::new();
    let secret = scratch.path("secret");
    fs::write(&secret, "").unwrap();
    let script = "mount -t tmpfs none /mnt && touch /mnt/x && echo mounted; hostname other && hostname; \
         mknod /tmp/disk b 1 0 2>/dev/null || echo no devices; echo 1 2>/dev/null >/proc/sys/kernel/panic || echo no settings; \
         ls /dev | grep -c loop; test -r /dev/null && echo null";
    let mut spec = sh(&scratch, script);
    spec.security = Security::privileged();
    let (printed, _) = scratch.run(&scratch.open(), spec).await;
    assert_eq!(printed, "mounted\nother\nno devices\nno settings\n0\nnull");
    assert!(!Path::new("/mnt/x").exists());
    assert_ne!(fs::read_to_string("/proc/sys/kernel/hostname").unwrap(), "other\n");
}

#[tokio::test]
async fn a_setuid_program_makes_root_of_the_container_alone() {
    let scratch = Scratch::new();
    let volume = scratch.dir("volume");
    fs::copy("/usr/bin/id", volume.join("id")).unwrap();
    fs::set_permissions(volume.join("id"), fs::Permissions::from_mode(0o4755)).unwrap();
    let mut spec = sh(&scratch, "/data/id -u; cat /proc/self/uid_map | tr -s ' '");
    spec.user = Some(65_534);
    spec.mounts = vec![mount(&volume, "/data", false)];
    assert_eq!(scratch.run(&scratch.open(), spec).await.0, "0\n 0 1900000000 65536");
}

#[tokio::test]
async fn further_processes_join_the_user_namespace() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let mut spec = sh(&scratch, "readlink /proc/self/ns/user; readlink /proc/self/ns/mnt; sleep 100");
    spec.security = Security::privileged();
    let log = spec.log.clone();
    let id = runtime.start(spec).await.unwrap();
    crate::scratch::until("it prints", || crate::scratch::texts(&log).len() == 2).await;
    for tty in [false, true] {
        let script = "readlink /proc/self/ns/user; readlink /proc/self/ns/mnt; id -u; touch /etc/exec; stat -c %u /etc/exec; \
             if test -t 0; then echo from here > $(tty); fi";
        let call = ExecCall {
            command: ["sh", "-c", script].map(str::to_owned).to_vec(),
            tty,
            ..ExecCall::default()
        };
        let mut exec = runtime.exec(&id, call).await.unwrap();
        let mut printed = String::new();
        exec.stdout.take().unwrap().read_to_string(&mut printed).await.unwrap();
        assert_eq!(exec.wait().await.unwrap(), 0, "{printed}");
        let namespaces = crate::scratch::texts(&log).join("\n");
        let more = if tty { "\nfrom here" } else { "" };
        assert_eq!(printed.replace("\r\n", "\n").trim_end(), format!("{namespaces}\n0\n0{more}"));
    }
    // Also when this process is another one than started it.
    drop(runtime);
    let runtime = scratch.open();
    let call = ExecCall { command: ["id", "-u"].map(str::to_owned).to_vec(), ..ExecCall::default() };
    let mut exec = runtime.exec(&id, call).await.unwrap();
    let mut printed = String::new();
    exec.stdout.take().unwrap().read_to_string(&mut printed).await.unwrap();
    assert_eq!((printed.as_str(), exec.wait().await.unwrap()), ("0\n", 0));
    runtime.stop(&id, std::time::Duration::ZERO).await;
}

#[tokio::test]
async fn what_cannot_be_is_said_when_the_container_starts() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let mut spec = sh(&scratch, "true");
    spec.mounts = vec![mount(Path::new("/sys/kernel"), "/data", false)];
    let (_, exited) = scratch.run(&runtime, spec).await;
    assert_eq!(exited.reason, Reason::StartError);
    assert!(
        exited.message.contains("show with the ids of the pod's user namespace /sys/kernel"),
        "{exited:?}"
    );
    let mut spec = sh(&scratch, "true");
    spec.user = Some(65_536);
    let (_, exited) = scratch.run(&runtime, spec).await;
    assert!(
        exited.message.contains("become user 65536: the pod's user namespace has the users 0 to 65535"),
        "{exited:?}"
    );
    let mut spec = sh(&scratch, "true");
    spec.user_namespace = Some(IdRange { first: u32::MAX - 10, count: 65_536 });
    let error = runtime.start(spec).await.unwrap_err();
    assert!(error.sentence().contains("user namespace"), "{}", error.sentence());
}
