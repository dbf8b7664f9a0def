//! `berth up --runtime cri`: pods of images by Debian's containerd, below the node that also runs processes.

use anyhow::{Context as _, Result, ensure};
use berth_e2e::containerd::{Containerd, NAMED, NUMBERED};
use berth_e2e::machine::run;
use berth_e2e::up::{Leftovers, Machine};
use serde_json::Value;

use crate::up::{claim, says, text, together, until_empty};

/// A machine whose pods a containerd of its own runs.
fn machine() -> Result<(Containerd, Machine)> {
    let containerd = Containerd::start()?;
    let machine = Machine::start_with(&["--runtime", "cri", "--cri-endpoint", &containerd.endpoint()])?;
    Ok((containerd, machine))
}

/// A pod of one container with these further lines, each indented as a field of the container.
fn pod(name: &str, fields: &[&str], of_pod: &[&str]) -> String {
    let lines = |lines: &[&str], indent: &str| -> String {
        lines.iter().flat_map(|line| [indent, line, "\n"]).collect()
    };
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{of: cri}}}}\nspec:\n  \
         terminationGracePeriodSeconds: 2\n{}  containers:\n  - name: main\n{}",
        lines(of_pod, "  "),
        lines(fields, "    "),
    )
}

const IMAGE: &str = "image: busybox";
const ONCE: &str = "imagePullPolicy: IfNotPresent";

/// Waits until the container of a pod waits for this reason.
fn waiting(machine: &Machine, pod: &str, reason: &str) -> Result<Value> {
    machine.until(&format!("{pod} waits: {reason}"), || {
        let status = machine.get(&format!("pod/{pod}"))?;
        let waits = text(&status, "/status/containerStatuses/0/state/waiting/reason") == reason;
        Ok(waits.then_some(status))
    })
}

/// Ends everything with `--purge`, and checks that the runtime has nothing of the machine any more.
fn finish(containerd: &Containerd, machine: Machine) -> Result<()> {
    machine.says(&["down", "--purge"])?;
    let left = containerd.containers()?;
    ensure!(left.is_empty(), "containerd has {left:?}");
    let left = Leftovers::of(machine.dir())?;
    ensure!(left.mounts.is_empty() && left.groups.is_empty(), "{left:?}");
    machine.finish()
}

#[test]
fn a_pod_of_an_image_writes_to_its_claim_and_leaves_nothing() -> Result<()> {
    let (containerd, machine) = machine()?;
    let script = "command: [sh, -c, 'echo written > /data/file; echo said; echo failed >&2; \
                  trap \"exit 0\" TERM; while true; do sleep 0.1; done']";
    let mount =
        "volumeMounts: [{name: data, mountPath: /data}, {name: data, mountPath: /below, subPath: a/b}]";
    let volume = "volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]";
    let probes = "readinessProbe: {exec: {command: [test, -e, /data/file]}, periodSeconds: 1}";
    let fields = [IMAGE, ONCE, script, mount, probes, "env: [{name: WHO, value: me}]"];
    machine.apply(&together(&[claim("data"), pod("one", &fields, &[volume])]))?;
    machine.ready("one")?;
    let status = machine.get("pod/one")?;
    says(text(&status, "/status/containerStatuses/0/containerID"), "containerd://")?;
    says(text(&machine.get("node/node-1")?, "/status/nodeInfo/containerRuntimeVersion"), "containerd://")?;
    says(&machine.event("Pod", "one", "Pulled")?, "already present on machine")?;

    ensure!(machine.exec("one", "cat /data/file")? == "written\n");
    // The image's files, and not this machine's.
    ensure!(
        machine.exec("one", "test -e /bin/busybox && ! test -e /usr/bin/apt && echo $WHO $HOSTNAME")?
            == "me one\n"
    );
    machine.exec("one", "echo low > /below/file")?;
    ensure!(machine.exec("one", "cat /data/a/b/file")? == "low\n");
    let options = machine.exec("one", "grep ' /data ' /proc/self/mountinfo")?;
    says(&options, "nosuid")?;
    ensure!(machine.kubectl(&["logs", "one"])?.contains("said\n"));

    // Input, its end, an exit code, and a program that is not there.
    let echoed = machine.kubectl_with(&["exec", "-i", "one", "--", "cat"], "through and back\n")?;
    ensure!(echoed == "through and back\n", "{echoed:?}");
    let code = machine.kubectl_command(&["exec", "one", "--", "sh", "-c", "exit 7"]).output()?.status.code();
    ensure!(code == Some(7), "{code:?}");
    let refused = machine.kubectl(&["exec", "one", "--", "no-such-program"]).unwrap_err();
    says(&format!("{refused:#}"), "no-such-program")?;

    machine.kubectl(&["delete", "pod/one", "pvc/data"])?;
    until_empty(&machine)?;
    machine.until("containerd has forgotten the pod", || {
        Ok(containerd.containers()?.is_empty().then_some(()))
    })?;
    finish(&containerd, machine)
}

#[test]
fn pods_with_the_root_of_the_machine_keep_nothing_mounted_outside_of_them() -> Result<()> {
    let (containerd, machine) = machine()?;
    let fields =
        [IMAGE, ONCE, "command: [sleep, '1000000']", "volumeMounts: [{name: root, mountPath: /root}]"];
    let volume = "volumes: [{name: root, hostPath: {path: /}}]";
    for name in ["one", "two", "three"] {
        machine.apply(&pod(name, &fields, &[volume]))?;
        machine.ready(name)?;
    }
    let copies = machine.data().join("node/cri");
    let mounts = Leftovers::of(machine.dir())?.mounts;
    let of_pods = mounts.iter().filter(|mount| mount.starts_with(&copies) && **mount != copies);
    ensure!(of_pods.count() == 0, "{mounts:?}");
    // What is mounted below it is there all the same.
    machine.exec("two", "test -e /root/proc/self/status")?;
    finish(&containerd, machine)
}

#[test]
fn mounts_that_come_later_are_seen_on_the_other_side() -> Result<()> {
    let (containerd, machine) = machine()?;
    let place = machine.dir().join("shared");
    std::fs::create_dir(&place)?;
    let path = place.to_str().context("the path is no text")?;
    run("mount", &["-t", "tmpfs", "tmpfs", path])?;
    run("mount", &["--make-shared", path])?;
    let volume = format!("volumes: [{{name: shared, hostPath: {{path: {path}}}}}]");
    let mount = |more: &str| format!("volumeMounts: [{{name: shared, mountPath: /shared{more}}}]");
    let (reads, writes) = (mount(""), mount(", mountPropagation: Bidirectional"));
    let command = "command: [sleep, '1000000']";
    let privileged = "securityContext: {privileged: true}";
    machine.apply(&together(&[
        pod("reads", &[IMAGE, ONCE, command, &reads], &[&volume]),
        pod("writes", &[IMAGE, ONCE, command, privileged, &writes], &[&volume]),
    ]))?;
    machine.ready("reads")?;
    machine.ready("writes")?;
    machine.exec(
        "writes",
        "mkdir /shared/mine && mount -t tmpfs tmpfs /shared/mine && touch /shared/mine/file",
    )?;
    ensure!(place.join("mine/file").exists(), "the machine sees what the pod mounts");
    machine.exec("reads", "test -e /shared/mine/file")?;
    std::fs::create_dir(place.join("later"))?;
    let later = format!("{path}/later");
    run("mount", &["-t", "tmpfs", "tmpfs", &later])?;
    std::fs::write(place.join("later/file"), "")?;
    for name in ["reads", "writes"] {
        machine.exec(name, "test -e /shared/later/file")?;
    }
    // The mount of a pod stays when the pod goes.
    machine.kubectl(&["delete", "pod/reads", "pod/writes"])?;
    ensure!(place.join("mine/file").exists(), "what the pod mounted stays");
    run("umount", &["--recursive", path])?;
    finish(&containerd, machine)
}

#[test]
fn images_that_cannot_be_had_are_waited_for_and_said() -> Result<()> {
    let (containerd, machine) = machine()?;
    machine.apply(&together(&[
        pod("wrong", &["image: localhost:1/no/such:image", "command: [sh]"], &[]),
        pod("never", &["image: nowhere.invalid/image:1", "imagePullPolicy: Never"], &[]),
        pod("named", &[&format!("image: {NAMED}"), "securityContext: {runAsNonRoot: true}"], &[]),
        pod("numbered", &[&format!("image: {NUMBERED}"), "securityContext: {runAsNonRoot: true}"], &[]),
        pod("asks", &[IMAGE, ONCE, "command: [no-such-program]"], &["restartPolicy: Never"]),
        pod("usual", &[IMAGE, ONCE], &["restartPolicy: Never"]),
        pod("words", &[IMAGE, ONCE, "args: [echo, by the pod]"], &["restartPolicy: Never"]),
    ]))?;
    let status = waiting(&machine, "wrong", "ImagePullBackOff")?;
    says(text(&status, "/status/containerStatuses/0/state/waiting/message"), "localhost:1/no/such:image")?;
    says(&machine.event("Pod", "wrong", "Pulling")?, "Pulling image \"localhost:1/no/such:image\"")?;
    says(&machine.event("Pod", "wrong", "BackOff")?, "Back-off pulling image")?;
    machine.event("Pod", "wrong", "Failed")?;
    waiting(&machine, "never", "ErrImageNeverPull")?;
    says(&machine.event("Pod", "never", "ErrImageNeverPull")?, "pull policy of Never")?;
    let status = waiting(&machine, "named", "CreateContainerConfigError")?;
    says(text(&status, "/status/containerStatuses/0/state/waiting/message"), "non-numeric user (somebody)")?;
    machine.ready("numbered")?;
    ensure!(machine.exec("numbered", "id -u; id -g")? == "1234\n2345\n");
    machine.wait("pod/asks", "jsonpath={.status.phase}=Failed")?;
    let ended = machine.get("pod/asks")?;
    let ended = &ended["status"]["containerStatuses"][0]["state"]["terminated"];
    ensure!(ended["exitCode"] == 128 && ended["reason"] == "StartError", "{ended}");
    says(text(ended, "/message"), "no-such-program")?;
    machine.wait("pod/usual", "jsonpath={.status.phase}=Succeeded")?;
    ensure!(machine.kubectl(&["logs", "usual"])? == "by the image\n");
    machine.wait("pod/words", "jsonpath={.status.phase}=Succeeded")?;
    ensure!(machine.kubectl(&["logs", "words"])? == "by the pod\n");
    // Corrected, it starts.
    machine.kubectl(&["set", "image", "pod/wrong", "main=busybox"])?;
    machine.until("the pod has an image", || {
        let image = machine.get("pod/wrong")?;
        let image = text(&image, "/status/containerStatuses/0/imageID");
        Ok(image.contains("sha256:").then_some(()))
    })?;
    finish(&containerd, machine)
}

#[test]
fn containers_outlive_kills_of_berth_and_of_their_runtime() -> Result<()> {
    let (mut containerd, mut machine) = machine()?;
    let script = "command: [sh, -c, 'echo life >> /data/lives; echo alive; \
                  until test -e /data/end; do sleep 0.1; done; rm /data/end; echo bye > /dev/termination-log; exit 3']";
    let fields = [IMAGE, ONCE, script, "volumeMounts: [{name: data, mountPath: /data}]"];
    let volume = "volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]";
    machine.apply(&together(&[claim("data"), pod("stays", &fields, &[volume])]))?;
    machine.ready("stays")?;
    let before = machine.get("pod/stays")?;
    machine.kill()?;
    machine.restart()?;
    machine.ready("stays")?;
    ensure!(machine.exec("stays", "cat /data/lives")? == "life\n", "it was not started again");
    let id = "/status/containerStatuses/0/containerID";
    ensure!(text(&machine.get("pod/stays")?, id) == text(&before, id));

    containerd.kill()?;
    containerd.restart()?;
    machine.until("commands run again", || Ok(machine.exec("stays", "true").ok()))?;
    machine.exec_last("stays", "touch /data/end")?;
    machine.wait("pod/stays", "jsonpath={.status.containerStatuses[0].restartCount}=1")?;
    machine.ready("stays")?;
    let status = machine.get("pod/stays")?;
    let last = &status["status"]["containerStatuses"][0]["lastState"]["terminated"];
    ensure!(last["exitCode"] == 3 && last["reason"] == "Error" && last["message"] == "bye\n", "{status}");
    ensure!(machine.kubectl(&["logs", "stays", "--previous"])? == "alive\n");

    // It ends while nobody looks, and the pod is deleted.
    machine.exec_last("stays", "touch /data/end")?;
    machine.kill()?;
    machine.restart()?;
    machine.wait("pod/stays", "jsonpath={.status.containerStatuses[0].restartCount}=2")?;
    machine.kubectl(&["delete", "pod/stays", "pvc/data"])?;
    until_empty(&machine)?;
    finish(&containerd, machine)
}

#[test]
fn a_runtime_that_is_not_there_is_one_sentence() -> Result<()> {
    let machine = Machine::new()?;
    let missing = format!("unix://{}/none.sock", machine.dir().display());
    let refused = machine.refuses(&["up", "--runtime", "cri", "--cri-endpoint", &missing])?;
    says(&refused, &format!("no container runtime answers at {missing}"))?;
    says(&refused, "--cri-endpoint")?;
    let refused = machine.refuses(&["up", "--runtime", "cri", "--cri-endpoint", "tcp://127.0.0.1:1"])?;
    says(&refused, "give unix:///path/to.sock")?;
    Ok(())
}
