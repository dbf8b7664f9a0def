//! Pods: logs, commands in them, restarts, volumes that grow, Deployments.

use std::{
    io::{BufRead as _, BufReader},
    process::Stdio,
};

use anyhow::{Context, Result, bail, ensure};
use berth_e2e::up::{Machine, wait};

use crate::up::{claim, pod, says, text, together, until_empty};

#[test]
fn logs_are_read_followed_and_kept_from_the_container_before() -> Result<()> {
    let machine = Machine::start()?;
    // Each life prints its number and ends when it is told to.
    let script = "n=$(cat /data/n 2>/dev/null || echo 0); echo $((n+1)) > /data/n; echo life $((n+1)); \
                  echo to stderr >&2; until test -e /data/end; do sleep 0.02; done; rm /data/end; exit 3";
    machine.apply(&together(&[claim("data"), pod("talks", "data", script)]))?;
    machine.ready("talks")?;
    let mut follow = machine.kubectl_command(&["logs", "-f", "talks"]).stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(follow.stdout.take().context("output was asked for")?).lines();
    ensure!(lines.next().context("the log ended")?? == "life 1");
    ensure!(lines.next().context("the log ended")?? == "to stderr");
    let refused = machine.kubectl(&["logs", "talks", "--previous"]).unwrap_err();
    says(&format!("{refused:#}"), "previous terminated container")?;

    machine.exec_last("talks", "touch /data/end")?;
    ensure!(lines.next().is_none(), "the log of a container ends with it");
    ensure!(wait(&mut follow)?.success());
    machine.wait("pod/talks", "jsonpath={.status.containerStatuses[0].restartCount}=1")?;
    machine.ready("talks")?;
    machine.until("the second life has printed all", || {
        Ok((machine.kubectl(&["logs", "talks"]).ok().as_deref() == Some("life 2\nto stderr\n")).then_some(()))
    })?;
    let before = machine.kubectl(&["logs", "talks", "--previous"])?;
    ensure!(before == "life 1\nto stderr\n", "{before}");
    let status = machine.get("pod/talks")?;
    let last = &status["status"]["containerStatuses"][0]["lastState"]["terminated"];
    ensure!(last["exitCode"] == 3 && last["reason"] == "Error", "{status}");
    ensure!(machine.kubectl(&["logs", "talks", "--tail=1"])? == "to stderr\n");
    machine.kubectl(&["delete", "pod/talks", "pvc/data"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn commands_run_in_a_container_with_input_a_terminal_and_an_exit_code() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply(&together(&[claim("data"), pod("one", "data", "exec sleep 1000000")]))?;
    machine.ready("one")?;
    let echoed = machine.kubectl_with(&["exec", "-i", "one", "--", "cat"], "through and back\n")?;
    ensure!(echoed == "through and back\n");
    let status = machine.kubectl_command(&["exec", "one", "--", "sh", "-c", "exit 7"]).output()?.status;
    ensure!(status.code() == Some(7), "{status}");
    let refused = machine.kubectl(&["exec", "one", "--", "no-such-program"]).unwrap_err();
    says(&format!("{refused:#}"), "no-such-program")?;

    // `script` gives kubectl a terminal; the container must see one too, and the container's own view.
    let kubectl = machine.kubectl_command(&[]);
    let in_container = "test -t 0 && test -t 1 && echo a terminal; hostname; stty size";
    let line = format!("{} exec -it one -- sh -c '{in_container}'", kubectl.get_program().to_string_lossy());
    let mut script = berth_e2e::machine::command("script");
    for (name, value) in kubectl.get_envs() {
        script.env(name, value.unwrap_or_default());
    }
    let typed = script.args(["-qec", &line, "/dev/null"]).stdin(Stdio::null()).output()?;
    let typed = String::from_utf8_lossy(&typed.stdout).into_owned();
    says(&typed, "a terminal")?;
    says(&typed, "one\r\n")?;

    // Its own processes, its own files: what it changes, the host does not see.
    let processes = machine.exec("one", "ls /proc | grep -c '^[0-9]'")?;
    ensure!(processes.trim().parse::<u32>()? < 10, "{processes} processes are seen in the container");
    let made = format!("/tmp/berth-{}", std::process::id());
    machine.exec("one", &format!("touch {made} && test -e {made}"))?;
    ensure!(!std::path::Path::new(&made).exists(), "a container wrote to the host");
    machine.finish()
}

#[test]
fn a_volume_grows_with_its_pod_or_says_why_not_yet() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply(&together(&[claim("data"), pod("one", "data", "exec sleep 1000000")]))?;
    machine.ready("one")?;
    machine.exec("one", "echo kept > /data/file")?;
    let patch = r#"{"spec":{"resources":{"requests":{"storage":"48Mi"}}}}"#;
    machine.kubectl(&["patch", "pvc", "data", "-p", patch])?;
    // The kernel grows a mounted ext4 only for processes with CAP_SYS_RESOURCE. The claim says the size that the pod has.
    let claim = machine.until("the volume has grown, or it is said why not", || {
        let claim = machine.get("pvc/data")?;
        let refused = claim["status"]["conditions"].as_array().is_some_and(|conditions| {
            conditions.iter().any(|condition| {
                condition["type"] == "NodeResizeError"
                    && text(condition, "/message").contains("CAP_SYS_RESOURCE")
            })
        });
        Ok((refused || claim["status"]["capacity"]["storage"] == "48Mi").then_some(claim))
    })?;
    let room = machine.exec("one", "df -k --output=size /data | tail -1")?.trim().parse::<u32>()?;
    match text(&claim, "/status/capacity/storage") {
        "48Mi" => ensure!(room > 32 << 10, "the claim has 48Mi and the filesystem {room} KiB"),
        "16Mi" => ensure!(room <= 16 << 10, "the claim has 16Mi and the filesystem {room} KiB"),
        other => bail!("the claim has {other}"),
    }
    let volume = text(&claim, "/spec/volumeName").to_owned();
    ensure!(machine.get(&format!("pv/{volume}"))?["spec"]["capacity"]["storage"] == "48Mi");
    ensure!(machine.exec("one", "cat /data/file")? == "kept\n");
    // At the latest the next pod has the room.
    machine.delete("pod/one")?;
    machine.apply(&pod("two", "data", "exec sleep 1000000"))?;
    machine.ready("two")?;
    let room = machine.exec("two", "cat /data/file; df -k --output=size /data | tail -1")?;
    let room = room.strip_prefix("kept\n").context("the data is gone")?.trim().parse::<u32>()?;
    ensure!(room > 32 << 10, "the filesystem has {room} KiB");
    machine.wait("pvc/data", "jsonpath={.status.capacity.storage}=48Mi")?;
    let smaller = r#"{"spec":{"resources":{"requests":{"storage":"16Mi"}}}}"#;
    let refused = machine.kubectl(&["patch", "pvc", "data", "-p", smaller]).unwrap_err();
    says(&format!("{refused:#}"), "can not be less than")?;
    machine.finish()
}

#[test]
fn a_deployment_replaces_a_pod_and_the_claim_stays() -> Result<()> {
    let machine = Machine::start()?;
    let deployment = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec:\n  replicas: 1\n  \
        strategy: {type: Recreate}\n  selector: {matchLabels: {app: web}}\n  template:\n    \
        metadata: {labels: {app: web}}\n    spec:\n      terminationGracePeriodSeconds: 1\n      \
        containers:\n      - name: main\n        image: busybox\n        \
        command: [sh, -c, 'echo life >> /data/log; exec sleep 1000000']\n        \
        volumeMounts: [{name: data, mountPath: /data}]\n      \
        volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]\n";
    machine.apply(&together(&[claim("data"), deployment.to_owned()]))?;
    machine.wait("deployment/web", "condition=Available")?;
    let first = machine.all("pods")?.remove(0);
    let first = text(&first, "/metadata/name");
    ensure!(first.starts_with("web-"), "{first}");
    machine.exec_until("deployment/web", "cat /data/log", |lives| lives == "life\n")?;
    machine.delete(&format!("pod/{first}"))?;
    machine.wait("deployment/web", "condition=Available")?;
    machine.exec_until("deployment/web", "cat /data/log", |lives| lives == "life\nlife\n")?;
    // A new template is a new pod, on the same volume.
    machine.kubectl(&["set", "env", "deployment/web", "VERSION=2"])?;
    machine.kubectl(&["rollout", "status", "deployment/web", "--timeout=45s"])?;
    let script = "cat /data/log; echo $VERSION";
    machine.exec_until("deployment/web", script, |printed| printed == "life\nlife\nlife\n2\n")?;
    machine.kubectl(&["delete", "deployment/web", "pvc/data"])?;
    until_empty(&machine)?;
    machine.finish()
}
