//! What the processes of a container may do, and that the files of a volume give them no more.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use berth_runtime::{Capabilities, ContainerSpec, ExecCall, Mount, Reason, Runtime as _, Security};

use crate::scratch::{Scratch, mount};

const STATUS: &str = "cat /proc/self/status";

fn fields(status: &str) -> HashMap<&str, &str> {
    status.lines().filter_map(|line| line.split_once(':')).map(|(key, value)| (key, value.trim())).collect()
}

fn capabilities(names: &[&str]) -> Capabilities {
    names.iter().fold(Capabilities::none(), |all, name| all.with(Capabilities::named(name).unwrap()))
}

/// A copy of `id` that root owns and everybody runs as root, in a directory for a volume.
fn setuid_program(directory: &Path) {
    let program = directory.join("id");
    fs::copy("/usr/bin/id", &program).unwrap();
    fs::set_permissions(program, fs::Permissions::from_mode(0o4755)).unwrap();
}

fn restricted(source: &Path, target: &str) -> Mount {
    Mount { restricted: true, ..mount(source, target, false) }
}

#[tokio::test]
async fn root_has_the_capabilities_of_the_container_and_no_more() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let cases = [
        (Security::default().capabilities, "00000000a00425fb"),
        (Capabilities::none(), "0000000000000000"),
        (capabilities(&["NET_ADMIN", "CAP_SYS_TIME"]), "0000000002001000"),
    ];
    for (given, expected) in cases {
        let mut spec = scratch.sh(STATUS);
        spec.security.capabilities = given;
        let (printed, _) = scratch.run(&runtime, spec).await;
        let status = fields(&printed);
        for set in ["CapPrm", "CapEff", "CapBnd"] {
            assert_eq!(status[set], expected, "{set} of {given:?}");
        }
        assert_eq!((status["CapInh"], status["CapAmb"]), ("0000000000000000", "0000000000000000"));
    }
}

#[tokio::test]
async fn another_user_has_no_capability_and_its_bound_is_that_of_the_container() {
    let scratch = Scratch::new();
    let mut spec = scratch.sh(STATUS);
    spec.user = Some(65534);
    let (printed, _) = scratch.run(&scratch.open(), spec).await;
    let status = fields(&printed);
    assert_eq!((status["CapEff"], status["CapPrm"]), ("0000000000000000", "0000000000000000"));
    assert_eq!(status["CapBnd"], "00000000a00425fb");
}

#[tokio::test]
async fn a_setuid_program_gives_no_rights_where_escalation_is_refused_or_the_volume_is_restricted() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let volume = scratch.dir("volume");
    setuid_program(&volume);
    let cases = [(false, false, "0"), (true, false, "65534"), (false, true, "65534")];
    for (no_new_privileges, is_restricted, expected) in cases {
        let mut spec = scratch.sh("/data/id -u; grep NoNewPrivs /proc/self/status");
        spec.user = Some(65534);
        spec.security.no_new_privileges = no_new_privileges;
        spec.mounts =
            vec![if is_restricted { restricted(&volume, "/data") } else { mount(&volume, "/data", false) }];
        let (printed, _) = scratch.run(&runtime, spec).await;
        let flag = u8::from(no_new_privileges);
        assert_eq!(
            printed,
            format!("{expected}\nNoNewPrivs:\t{flag}"),
            "{no_new_privileges} {is_restricted}"
        );
    }
}

#[tokio::test]
async fn a_device_node_in_a_restricted_volume_cannot_be_opened() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let volume = scratch.dir("volume");
    let made = Command::new("mknod").arg(volume.join("zero")).args(["c", "1", "5"]).status().unwrap();
    assert!(made.success());
    let mut spec = scratch.sh("head -c 1 /data/zero 2>&1 | grep -c denied");
    spec.mounts = vec![restricted(&volume, "/data")];
    assert_eq!(scratch.run(&runtime, spec).await.0, "1");
    let (printed, _) = scratch.run(&runtime, scratch.sh("mknod /tmp/zero c 1 5 2>&1")).await;
    assert!(printed.contains("not permitted"), "{printed}");
}

#[tokio::test]
async fn system_calls_beyond_the_container_are_refused_by_the_filter() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let attempts = "for attempt in 'unshare --user true' 'unshare --mount true' 'mount -t tmpfs none /mnt'; do \
         $attempt >/dev/null 2>&1 && echo done || echo refused; done; grep Seccomp: /proc/self/status; (echo fork works)";
    let run = |security: Security| {
        let mut spec = scratch.sh(attempts);
        spec.security = security;
        scratch.run(&runtime, spec)
    };
    let all = Security { host_devices: false, ..Security::privileged() };
    let (printed, _) = run(all.clone()).await;
    assert_eq!(printed, "done\ndone\ndone\nSeccomp:\t0\nfork works");
    // With SYS_ADMIN the filter leaves namespaces and mounts alone; without it, nothing else refuses a user namespace.
    let (printed, _) = run(Security { seccomp: true, ..all }).await;
    assert_eq!(printed, "done\ndone\ndone\nSeccomp:\t2\nfork works");
    let (printed, _) = run(Security { seccomp: true, ..Security::default() }).await;
    assert_eq!(printed, "refused\nrefused\nrefused\nSeccomp:\t2\nfork works");
}

#[tokio::test]
async fn files_of_the_kernel_are_masked_and_read_only_unless_the_container_is_privileged() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let script = "wc -c < /proc/timer_list; ls /proc/scsi /sys/firmware 2>/dev/null | grep -cv :; \
         (echo 1 > /proc/sys/vm/overcommit_memory) 2>&1 | grep -c Read-only";
    let (printed, _) = scratch.run(&runtime, scratch.sh(script)).await;
    let lines: Vec<_> = printed.lines().collect();
    assert_eq!((lines[0], *lines.last().unwrap()), ("0", "1"), "{printed}");
    let mut spec =
        scratch.sh("test -w /proc/sys/vm/overcommit_memory && grep -q ' /sys .*rw' /proc/mounts && echo yes");
    spec.security = Security::privileged();
    assert_eq!(scratch.run(&runtime, spec).await.0, "yes");
}

#[tokio::test]
async fn a_privileged_container_has_the_devices_and_capabilities_of_the_host() {
    let scratch = Scratch::new();
    let mut spec = scratch
        .sh("test -c /dev/loop-control && test -c /dev/null && test -d /dev/pts && cat /proc/self/status");
    spec.security = Security::privileged();
    let (printed, exited) = scratch.run(&scratch.open(), spec).await;
    assert_eq!(exited.code, 0, "{printed}");
    let own = fs::read_to_string("/proc/self/status").unwrap();
    assert_eq!(fields(&printed)["CapEff"], fields(&own)["CapPrm"]);
}

#[tokio::test]
async fn a_process_started_later_is_restricted_like_the_container() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let mut spec = scratch.spec(&["sleep", "1000"]);
    spec.security = Security {
        no_new_privileges: true,
        seccomp: true,
        capabilities: Capabilities::none(),
        ..Security::default()
    };
    let id = runtime.start(spec).await.unwrap();
    let command = vec!["sh".into(), "-c".into(), STATUS.into()];
    let mut exec = runtime.exec(&id, ExecCall { command, ..ExecCall::default() }).await.unwrap();
    let printed = crate::exec::all(exec.stdout.take()).await;
    let status = fields(&printed);
    assert_eq!((status["CapEff"], status["CapBnd"]), ("0000000000000000", "0000000000000000"));
    assert_eq!((status["NoNewPrivs"], status["Seccomp"]), ("1", "2"));
    runtime.stop(&id, std::time::Duration::ZERO).await;
}

#[test]
fn a_specification_written_by_an_older_version_can_be_read() {
    let scratch = Scratch::new();
    let mut spec = serde_json::to_value(scratch.sh("true")).unwrap();
    spec.as_object_mut().unwrap().remove("security");
    let spec: ContainerSpec = serde_json::from_value(spec).unwrap();
    assert_eq!(spec.security, Security::default());
}

fn below(source: &Path, sub_path: &str) -> Mount {
    Mount { sub_path: Some(sub_path.into()), ..mount(source, "/data", false) }
}

#[tokio::test]
async fn a_sub_path_appears_instead_of_the_volume_and_is_made_with_its_mode() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let volume = scratch.dir("volume");
    fs::set_permissions(&volume, fs::Permissions::from_mode(0o2770)).unwrap();
    fs::create_dir(volume.join("there")).unwrap();
    fs::write(volume.join("there/file"), "content").unwrap();
    symlink("there", volume.join("link")).unwrap();
    for (path, script, expected) in [
        ("there", "cat /data/file", "content"),
        ("there/file", "cat /data", "content"),
        ("link", "cat /data/file", "content"),
        ("link/file", "cat /data", "content"),
        ("new/deep/er", "echo x > /data/y; ls /data", "y"),
    ] {
        let mut spec = scratch.sh(script);
        spec.mounts = vec![below(&volume, path)];
        assert_eq!(scratch.run(&runtime, spec).await.0, expected, "{path}");
    }
    for made in ["new", "new/deep", "new/deep/er"] {
        let mode = fs::metadata(volume.join(made)).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o2770, "{made}");
    }
    assert!(volume.join("new/deep/er/y").exists());
}

#[tokio::test]
async fn a_sub_path_that_leads_out_of_the_volume_is_refused() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let (volume, outside) = (scratch.dir("volume"), scratch.dir("outside"));
    fs::write(outside.join("secret"), "").unwrap();
    symlink(&outside, volume.join("absolute")).unwrap();
    symlink("../outside", volume.join("climbing")).unwrap();
    fs::create_dir(volume.join("inside")).unwrap();
    for path in [
        "absolute",
        "absolute/secret",
        "absolute/new",
        "climbing",
        "climbing/new/dir",
        "..",
        "inside/../../outside",
        "/etc",
    ] {
        let mut spec = scratch.sh("ls /data");
        spec.mounts = vec![below(&volume, path)];
        let (printed, exited) = scratch.run(&runtime, spec).await;
        assert_eq!((exited.reason, printed.as_str()), (Reason::StartError, ""), "{path}: {}", exited.message);
    }
    let left: Vec<_> = fs::read_dir(&outside).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["secret"]);
}

#[tokio::test]
async fn exchanging_a_sub_path_for_a_link_meanwhile_leads_nowhere() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let (volume, outside) = (scratch.dir("volume"), scratch.dir("outside"));
    fs::write(outside.join("secret"), "").unwrap();
    fs::create_dir(volume.join("sub")).unwrap();
    symlink(&outside, volume.join("other")).unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let exchanging = std::thread::spawn({
        let (sub, other, done) = (volume.join("sub"), volume.join("other"), done.clone());
        move || {
            while !done.load(Ordering::Relaxed) {
                let exchange = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(rustix::fs::CWD, &sub, rustix::fs::CWD, &other, exchange).unwrap();
            }
        }
    });
    for _ in 0..100 {
        let mut spec = scratch.sh("ls /data; mkdir -p /data/x");
        spec.mounts = vec![below(&volume, "sub/new")];
        let (printed, _) = scratch.run(&runtime, spec).await;
        assert!(!printed.contains("secret"), "{printed}");
    }
    done.store(true, Ordering::Relaxed);
    exchanging.join().unwrap();
    let left: Vec<_> = fs::read_dir(&outside).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["secret"]);
}
