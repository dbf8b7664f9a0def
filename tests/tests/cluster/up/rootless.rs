//! `berth up`, `berth demo` and the other commands as an ordinary user: no root, no `sudo`.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::{
    driver, machine, nfs, sanity,
    up::{
        Leftovers, Machine, PATIENCE, texts,
        user::{USER, User},
    },
};
use rustix::process::{Pid, Signal};

use super::{claim, pod, says, text, together, until_empty};

/// A pod with every kind of volume that needs no device, mounted also where only root may make directories.
const EVERY_VOLUME: &str = r"
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {colour: green}
---
apiVersion: v1
kind: Secret
metadata: {name: password}
stringData: {password: hidden}
---
apiVersion: v1
kind: Pod
metadata: {name: every, labels: {app: every}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: busybox
    command:
    - sh
    - -c
    - |
      set -e
      echo claim > /data/file; echo sub > /usr/share/berth-test/sub/file; echo disk > /scratch/file
      echo memory > /memory/file; echo own > /var/lib/own; touch /tmp/own /etc/own /root/own
      exec sleep 1000000
    volumeMounts:
    - {name: data, mountPath: /data}
    - {name: data, mountPath: /usr/share/berth-test/sub, subPath: a/b}
    - {name: scratch, mountPath: /scratch}
    - {name: memory, mountPath: /memory}
    - {name: settings, mountPath: /etc/settings}
    - {name: settings, mountPath: /etc/colour, subPath: colour}
    - {name: password, mountPath: /var/run/berth-test/password}
    - {name: about, mountPath: /opt/about}
    - {name: all, mountPath: /srv/all}
  volumes:
  - {name: data, persistentVolumeClaim: {claimName: data}}
  - {name: scratch, emptyDir: {}}
  - {name: memory, emptyDir: {medium: Memory, sizeLimit: 4Mi}}
  - {name: settings, configMap: {name: settings}}
  - {name: password, secret: {secretName: password, defaultMode: 0400}}
  - {name: about, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}
  - name: all
    projected:
      sources:
      - serviceAccountToken: {path: token}
      - secret: {name: password}
";

#[test]
fn pods_have_every_volume_that_needs_no_device() -> Result<()> {
    let machine = Machine::start_as(Ok, &[])?;
    says(&machine.log(), "without root: local volumes are directories")?;
    says(&machine.log(), "volumes are dir by default")?;
    machine.apply(&together(&[claim("data"), EVERY_VOLUME.to_owned()]))?;
    machine.ready("every")?;
    for (file, content) in [
        ("/data/file", "claim\n"),
        ("/data/a/b/file", "sub\n"),
        ("/usr/share/berth-test/sub/file", "sub\n"),
        ("/scratch/file", "disk\n"),
        ("/memory/file", "memory\n"),
        ("/var/lib/own", "own\n"),
        ("/etc/settings/colour", "green"),
        ("/etc/colour", "green"),
        ("/var/run/berth-test/password/password", "hidden"),
        ("/opt/about/labels", "app=\"every\""),
        ("/srv/all/password", "hidden"),
    ] {
        let read = machine.exec("every", &format!("cat {file}"))?;
        ensure!(read == content, "{file} has {read:?}");
    }
    let own = machine.exec(
        "every",
        "id -u; hostname; cat /etc/hostname; ls /proc/self/fd >/dev/null; wc -c < /dev/null",
    )?;
    ensure!(own == "0\nevery\nevery\n0\n", "{own}");
    let processes = machine.exec("every", "ls -d /proc/[0-9]* | wc -l")?;
    ensure!(processes.trim().parse::<u32>()? < 8, "it sees processes of others: {processes}");
    let on_host = machine.exec("every", &format!("ls -A {}; touch /etc/passwd", machine.data().display()));
    says(&format!("{:#}", on_host.unwrap_err()), "Permission denied")?;

    let volumes = machine.data().join("local/volumes");
    let volume = fs::read_dir(&volumes)?.next().context("there is no volume")??.path();
    ensure!(fs::metadata(volume.join("data/file"))?.uid() == USER, "the user's data is another's");
    says(&machine.explain("pvc/data")?, "PUBLISHED")?;
    says(&machine.says(&["status"])?, "Berth runs in")?;
    let grow = r#"{"spec":{"resources":{"requests":{"storage":"32Mi"}}}}"#;
    machine.kubectl(&["patch", "pvc/data", "-p", grow])?;
    machine.wait("pvc/data", "jsonpath={.status.capacity.storage}=32Mi")?;
    machine.kubectl(&["delete", "pod/every", "pvc/data"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn what_needs_root_is_said_by_events_that_name_the_field() -> Result<()> {
    let machine = Machine::start_as(Ok, &[])?;
    let class = "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: images}\n\
                 provisioner: local.berth.dev\nparameters: {kind: image}\n";
    let image = claim("image").replace("spec:\n", "spec:\n  storageClassName: images\n");
    let block = claim("block").replace("spec:\n", "spec:\n  volumeMode: Block\n");
    let other = pod("other", "data", "exec sleep 1000000");
    let group = other
        .replace("name: other", "name: group")
        .replace("spec:\n", "spec:\n  securityContext: {fsGroup: 2000}\n");
    let other = other.replace("spec:\n", "spec:\n  securityContext: {runAsUser: 1000}\n");
    let huge = "apiVersion: v1\nkind: Pod\nmetadata: {name: huge}\nspec:\n  containers:\n  - name: main\n    image: busybox\n    \
                command: [sleep, inf]\n    resources: {limits: {hugepages-2Mi: 2Mi, memory: 1Mi}}\n    \
                volumeMounts: [{name: huge, mountPath: /huge}]\n  volumes: [{name: huge, emptyDir: {medium: HugePages}}]\n";
    let raw = "apiVersion: v1\nkind: Pod\nmetadata: {name: raw}\nspec:\n  containers:\n  - name: main\n    image: busybox\n    \
               command: [sleep, inf]\n    volumeDevices: [{name: raw, devicePath: /dev/raw}]\n  \
               volumes: [{name: raw, persistentVolumeClaim: {claimName: block}}]\n";
    let manifests = [class.to_owned(), claim("data"), image, block, other, group, raw.to_owned()];
    machine.apply(&together(&manifests))?;
    says(&machine.event("PersistentVolumeClaim", "image", "ProvisioningFailed")?, "kind=image needs root")?;
    says(&machine.event("PersistentVolumeClaim", "block", "ProvisioningFailed")?, "only root may use")?;
    says(&machine.event("Pod", "other", "FailedMount")?, "runAsUser 1000 does not exist on this node")?;
    says(&machine.event("Pod", "group", "FailedMount")?, "fsGroup 2000 does not exist on this node")?;
    // Nobody may have more huge pages than the node has, which here may be none.
    machine.apply(&huge.replace("spec:\n", "spec:\n  nodeName: node-1\n"))?;
    says(&machine.event("Pod", "huge", "FailedMount")?, "medium HugePages needs root")?;
    machine.kubectl(&["delete", "pod", "--all"])?;
    machine.finish()
}

#[test]
fn pods_and_volumes_survive_a_kill_and_nothing_is_left_in_the_end() -> Result<()> {
    let mut machine = Machine::start_as(Ok, &[])?;
    let script = "echo $$ >> /data/lives; exec sleep 1000000";
    machine.apply(&together(&[claim("data"), pod("stays", "data", script)]))?;
    machine.ready("stays")?;
    let container = |machine: &Machine| -> Result<String> {
        Ok(text(&machine.get("pod/stays")?, "/status/containerStatuses/0/containerID").to_owned())
    };
    let before = container(&machine)?;
    machine.kill()?;
    machine.restart()?;
    machine.ready("stays")?;
    let after = container(&machine)?;
    ensure!(after == before, "the container {before} was not taken over; there is {after}");
    machine.exec("stays", "echo after >> /data/lives")?;
    ensure!(machine.exec("stays", "wc -l < /data/lives")? == "2\n");

    // Whoever also kills the process that keeps the namespaces gets new ones, and pods start again on the same data.
    let keeper = fs::read_to_string(machine.data().join("namespace"))?;
    let keeper = keeper.trim().parse().ok().and_then(Pid::from_raw).context("it names no process")?;
    machine.kill()?;
    rustix::process::kill_process(keeper, Signal::KILL)?;
    machine.restart()?;
    machine.wait("pod/stays", "jsonpath={.status.containerStatuses[0].restartCount}=1")?;
    machine.ready("stays")?;
    machine.exec_until("stays", "wc -l < /data/lives", |lines| lines == "3\n")?;

    // After the last kill `berth down` finds everything by itself.
    machine.kill()?;
    says(&machine.says(&["down"])?, "Cleaned up after a kill")?;
    machine.nothing_left()?;
    machine.restart()?;
    machine.ready("stays")?;
    ensure!(machine.signal(Signal::TERM)?.success());
    machine.nothing_left().context("after SIGTERM")?;
    says(&machine.says(&["down", "--purge"])?, "Removed")?;
    ensure!(!machine.data().exists());
    machine.nothing_left()
}

#[test]
fn a_start_that_fails_leaves_no_process() -> Result<()> {
    let (home, user, program) = home()?;
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let words = ["up", "--ui=false", "--listen", &taken.local_addr()?.to_string()];
    let output = user.command(&program).args(words).stdin(Stdio::null()).output()?;
    says(&texts(&output).1, "is something else there?")?;
    let left = Leftovers::of(home.path())?;
    ensure!(left.processes.is_empty(), "{left:?}");
    Ok(())
}

/// Ids of their own for pods, where the administrator gave the user a range; NFS, where it may open `/dev/fuse`.
#[test]
fn a_user_with_ids_and_fuse_has_pods_of_other_users_and_nfs() -> Result<()> {
    let server = nfs::Server::start_own()?;
    let machine = Machine::start_as(|user| user.with_ids()?.with_fuse(), &[])?;
    says(&machine.log(), "pods run as users 0 to 65536; NFS is mounted through FUSE")?;
    let options = &server.options;
    let manifest = format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: share}}\nspec:\n  capacity: {{storage: 1Gi}}\n  \
         accessModes: [ReadWriteMany]\n  storageClassName: \"\"\n  mountOptions: [{options}]\n  \
         nfs: {{server: 127.0.0.1, path: /export}}\n---\n\
         apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: share}}\nspec:\n  accessModes: [ReadWriteMany]\n  \
         storageClassName: \"\"\n  volumeName: share\n  resources: {{requests: {{storage: 1Gi}}}}\n---\n\
         apiVersion: v1\nkind: Pod\nmetadata: {{name: other}}\nspec:\n  terminationGracePeriodSeconds: 1\n  \
         securityContext: {{runAsUser: 1000, runAsGroup: 1000, fsGroup: 2000, supplementalGroups: [3000]}}\n  \
         containers:\n  - name: main\n    image: busybox\n    command: [sh, -c, 'echo mine > /data/file; exec sleep inf']\n    \
         volumeMounts: [{{name: data, mountPath: /data}}]\n  \
         volumes:\n  - {{name: data, persistentVolumeClaim: {{claimName: data}}}}\n---\n\
         apiVersion: v1\nkind: Pod\nmetadata: {{name: nfs}}\nspec:\n  terminationGracePeriodSeconds: 1\n  \
         containers:\n  - name: main\n    image: busybox\n    command: [sh, -c, 'echo far > /share/file; exec sleep inf']\n    \
         volumeMounts: [{{name: share, mountPath: /share}}]\n  \
         volumes:\n  - {{name: share, persistentVolumeClaim: {{claimName: share}}}}\n"
    );
    machine.apply(&together(&[claim("data"), manifest]))?;
    machine.ready("other")?;
    let seen = machine.exec_until("other", "id -u; id -g; id -G; stat -c %u:%g /data/file", |seen| {
        seen.lines().count() == 4
    })?;
    ensure!(
        seen == "1000\n1000\n1000 2000 3000\n1000:2000\n"
            || seen == "1000\n1000\n1000 3000 2000\n1000:2000\n",
        "{seen}"
    );
    machine.ready("nfs")?;
    machine.exec_until("nfs", "cat /share/file", |read| read == "far\n")?;
    ensure!(fs::read_to_string(server.export().join("file"))? == "far\n");
    machine.kubectl(&["delete", "pod/other", "pod/nfs", "pvc/data", "pvc/share", "pv/share"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn the_local_driver_conforms_in_all_that_needs_no_device() -> Result<()> {
    let (home, user, program) = home()?;
    let path = |name: &str| home.path().join(name).display().to_string();
    fs::write(home.path().join("parameters.yaml"), "kind: dir")?;
    fs::write(home.path().join("mutable.yaml"), "noatime: \"true\"")?;
    let endpoint = format!("unix://{}", path("csi.sock"));
    let mut driver = user.command(Path::new("unshare"));
    driver.args(["--map-root-user", "--mount"]).arg(&program);
    driver.args(["driver", "local", "--node-id", "node-1", "--attach", "--max-volumes-per-node", "4"]);
    driver.args(["--endpoint", &endpoint, "--data-dir", &path("data")]);
    let mut driver = driver.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let begun = Instant::now();
    while !home.path().join("csi.sock").exists() {
        ensure!(begun.elapsed() < PATIENCE, "the driver does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    let args = [
        format!("--csi.endpoint={endpoint}"),
        format!("--csi.mountdir={}", path("mount")),
        format!("--csi.stagingdir={}", path("staging")),
        format!("--csi.testvolumeparameters={}", path("parameters.yaml")),
        format!("--csi.testvolumemutableparameters={}", path("mutable.yaml")),
        "--csi.testvolumeaccesstype=mount".to_owned(),
        "--csi.testnodevolumeattachlimit".to_owned(),
        "--csi.testvolumesize=16777216".to_owned(),
        "--csi.testvolumeexpandsize=33554432".to_owned(),
    ];
    let outcome = sanity::run_by(user.command(&sanity::program()?), home.path(), &args);
    driver.kill()?;
    driver.wait()?;
    let outcome = outcome?;
    writeln!(std::io::stderr(), "csi-sanity without root: {outcome}")?;
    ensure!(outcome.failures.is_empty(), "csi-sanity failed:\n{}", outcome.failures.join("\n"));
    ensure!(outcome.count("skipped") == 0 && outcome.count("passed") == sanity::SPECS, "{outcome}");
    Ok(())
}

/// A home for a user, with a program in it.
fn home() -> Result<(tempfile::TempDir, User, PathBuf)> {
    let home = tempfile::Builder::new().prefix("up-").rand_bytes(5).tempdir()?;
    let program = home.path().join("berth");
    fs::copy(driver::binary()?, &program)?;
    let user = User::new(home.path())?;
    Ok((home, user, program))
}

#[test]
fn the_demo_needs_no_root_and_asks_for_none() -> Result<()> {
    let (home, user, program) = home()?;
    let output = user.command(&program).args(["demo", "--no-pause"]).stdin(Stdio::null()).output()?;
    let (printed, complaint) = texts(&output);
    ensure!(output.status.success(), "{complaint}{printed}");
    says(&printed, "the claim has 128Mi")?;
    says(&printed, "Everything was removed")?;
    let left = Leftovers::of(home.path())?;
    ensure!(left.mounts.is_empty() && left.processes.is_empty(), "{left:?}");
    let names: Vec<_> = fs::read_dir(home.path())?
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<Result<_, _>>()?;
    ensure!(names == ["berth"], "it left {names:?}");

    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let make = machine::command("make").args(["--dry-run", "demo"]).current_dir(&repository).output()?;
    let (recipe, complaint) = texts(&make);
    ensure!(make.status.success() && !recipe.contains("sudo"), "{recipe}{complaint}");
    let deps = fs::read(repository.join("testbed/deps.sh"))?;
    fs::write(home.path().join("deps.sh"), deps)?;
    let output = user.command(Path::new("bash")).arg(home.path().join("deps.sh")).arg("build").output()?;
    ensure!(output.status.success() && output.stdout.is_empty(), "{:?}", texts(&output));
    Ok(())
}

#[test]
fn data_is_kept_at_home_and_commands_find_it_there() -> Result<()> {
    let (home, user, program) = home()?;
    let berth = |words: &[&str]| -> Result<String> {
        let output = user
            .command(&program)
            .args(words)
            .env_remove("BERTH_DATA_DIR")
            .env_remove("KUBECONFIG")
            .output()?;
        let (printed, complaint) = texts(&output);
        ensure!(output.status.success(), "berth {words:?}: {complaint}{printed}");
        Ok(printed)
    };
    let begun = berth(&["up", "--detach", "--listen", "127.0.0.1:0", "--ui=false"])?;
    let data = home.path().join(".local/share/berth");
    says(&begun, &format!("{}/apiserver/kubeconfig", data.display()))?;
    ensure!(!begun.contains("--data-dir"), "{begun}");
    ensure!(fs::metadata(&data)?.uid() == USER);
    says(&berth(&["status"])?, &data.display().to_string())?;
    says(&berth(&["doctor"])?, "No problems found")?;
    says(&berth(&["down", "--purge"])?, "Removed")?;
    ensure!(!data.exists());
    let left = Leftovers::of(home.path())?;
    ensure!(left.processes.is_empty(), "{left:?}");
    Ok(())
}

#[test]
fn a_machine_that_forbids_user_namespaces_is_told_in_one_sentence() -> Result<()> {
    let (home, _user, program) = home()?;
    // In a user namespace of its own this switch is the machine's. The ids are set from outside.
    let inner = format!(
        "echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --reuid={USER} --regid={USER} --clear-groups \"$0\" \"$@\""
    );
    for words in [&["up", "--listen", "127.0.0.1:0"][..], &["demo"]] {
        let mut command = machine::command("unshare");
        command
            .args(["--user", "sh", "-c", "echo ready; read go; exec sh -c \"$0\" \"$@\"", &inner])
            .arg(&program);
        command.args(words).env("HOME", home.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::piped()).spawn()?;
        let mut lines = BufReader::new(child.stdout.take().context("output was asked for")?);
        let mut line = String::new();
        lines.read_line(&mut line)?;
        for map in ["uid_map", "gid_map"] {
            fs::write(format!("/proc/{}/{map}", child.id()), "0 0 100000")?;
        }
        child.stdin.take().context("input was asked for")?.write_all(b"go\n")?;
        let output = child.wait_with_output()?;
        let (_, complaint) = texts(&output);
        ensure!(output.status.code() == Some(1), "{complaint}");
        says(&complaint, "without root this needs a user namespace, and it was refused")?;
        says(&complaint, "sysctl -w user.max_user_namespaces")?;
        ensure!(complaint.lines().count() == 1, "{complaint}");
    }
    Ok(())
}
