//! What kubectl does with a running pod besides logs and exec: attach, port-forward, cp, debug, top; limits; long logs.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Child, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use berth_e2e::up::{Machine, NODE, wait};
use rustix::process::{Pid, Signal};

use crate::up::{says, text};

/// A pod of one container; `more` are further lines of its own.
fn pod(name: &str, script: &str, more: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{app: {name}}}}}\nspec:\n  restartPolicy: Never\n  \
         terminationGracePeriodSeconds: 1\n  containers:\n  - name: main\n    image: busybox\n    \
         command: [sh, -c, {script:?}]\n{more}"
    )
}

/// Ends kubectl as Ctrl-C does.
fn interrupt(child: &mut Child) -> Result<()> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a child has an id")?;
    rustix::process::kill_process(pid, Signal::INT)?;
    wait(child).map(drop)
}

#[test]
fn attach_joins_the_streams_of_a_container_which_goes_on() -> Result<()> {
    let machine = Machine::start()?;
    let script = "while read line; do echo got $line; echo err $line >&2; done; echo input ended";
    machine.apply(&pod("talks", script, "    stdin: true\n"))?;
    machine.apply(&pod("once", "cat; echo over", "    stdin: true\n    stdinOnce: true\n"))?;
    machine.apply(&pod(
        "terminal",
        "read line; echo size $(stty size) $line; exec sleep 1000000",
        "    stdin: true\n    tty: true\n",
    ))?;
    machine.ready("talks")?;
    for round in ["one", "two"] {
        let mut attach = machine
            .kubectl_command(&["attach", "-i", "-q", "talks"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut input = attach.stdin.take().context("there is input")?;
        let mut output = BufReader::new(attach.stdout.take().context("there is output")?).lines();
        writeln!(input, "{round}")?;
        ensure!(output.next().context("no output")?? == format!("got {round}"));
        let mut errors = BufReader::new(attach.stderr.take().context("there are errors")?).lines();
        let error = errors.find(|line| line.as_ref().is_ok_and(|line| line.contains("err ")));
        ensure!(error.context("no error output")?? == format!("err {round}"));
        interrupt(&mut attach)?;
    }
    ensure!(machine.kubectl(&["logs", "talks"])?.contains("got one"), "what is attached is also logged");

    // With `stdinOnce` the end of the input is the container's.
    machine.ready("once")?;
    let said = machine.kubectl_with(&["attach", "-i", "-q", "once"], "through\n")?;
    says(&said, "through\n")?;
    machine.wait("pod/once", "jsonpath={.status.phase}=Succeeded")?;
    says(&machine.kubectl(&["logs", "once"])?, "over")?;

    machine.ready("terminal")?;
    let kubectl = machine.kubectl_command(&[]);
    let line =
        format!("stty cols 77 rows 11; {} attach -it -q terminal", kubectl.get_program().to_string_lossy());
    let mut script = berth_e2e::machine::command("script");
    for (name, value) in kubectl.get_envs() {
        script.env(name, value.unwrap_or_default());
    }
    let mut typed =
        script.args(["-qec", &line, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut keys = typed.stdin.take().context("there is input")?;
    // The terminal has its size once the client has sent it, which it does first.
    machine.until("the terminal has the client's size", || {
        let size = machine.exec("terminal", "stty size < /dev/pts/0").unwrap_or_default();
        Ok((size.trim() == "11 77").then_some(()))
    })?;
    writeln!(keys, "typed")?;
    let mut output = BufReader::new(typed.stdout.take().context("there is output")?).lines();
    let seen = output.find(|line| line.as_ref().is_ok_and(|line| line.contains("size ")));
    says(&seen.context("the terminal says nothing")??, "size 11 77 typed")?;
    typed.kill()?;
    typed.wait()?;
    let refused = machine.kubectl(&["attach", "once"]).unwrap_err();
    says(&format!("{refused:#}"), "completed")?;
    machine.finish()
}

/// Sends back what each client sends, on a port of this machine, which is also its pods'.
fn echo() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut reader = stream.try_clone().expect("a socket can be cloned");
                let mut writer = stream;
                let _ = std::io::copy(&mut reader, &mut writer);
                let _ = writer.shutdown(std::net::Shutdown::Write);
            });
        }
    });
    Ok(port)
}

/// Sends bytes through a port and checks that they come back.
fn exchange(port: u16, length: usize) -> Result<()> {
    let sent: Vec<u8> = (0..length).map(|at| u8::try_from(at % 251).unwrap_or(0)).collect();
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(berth_e2e::up::PATIENCE))?;
    let (mut reader, mut writer) = (stream.try_clone()?, stream);
    let bytes = sent.clone();
    let writing = thread::spawn(move || -> std::io::Result<()> {
        writer.write_all(&bytes)?;
        writer.shutdown(std::net::Shutdown::Write)
    });
    let mut back = Vec::new();
    reader.read_to_end(&mut back)?;
    writing.join().expect("writing does not panic")?;
    ensure!(back == sent, "{} of {length} bytes came back", back.len());
    Ok(())
}

#[test]
fn ports_are_forwarded_by_websocket_and_by_spdy() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply(&pod("server", "exec sleep 1000000", ""))?;
    machine.ready("server")?;
    let port = echo()?;
    let closed = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    for websockets in ["true", "false"] {
        let mut forward = machine
            .kubectl_command(&["port-forward", "pod/server", &format!(":{port}"), &format!(":{closed}")])
            .env("KUBECTL_PORT_FORWARD_WEBSOCKETS", websockets)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(forward.stdout.take().context("there is output")?).lines();
        let mut local = |wanted: u16| -> Result<u16> {
            loop {
                let line = lines.next().context("kubectl ended")??;
                let ours = line.strip_prefix("Forwarding from 127.0.0.1:");
                let ours = ours.and_then(|line| line.strip_suffix(&format!(" -> {wanted}")));
                if let Some(ours) = ours {
                    return Ok(ours.parse()?);
                }
            }
        };
        let (open, refused) = (local(port)?, local(closed)?);
        exchange(open, 10)?;
        exchange(open, 3_000_000)?;
        let many: Vec<_> = (0..10).map(|_| thread::spawn(move || exchange(open, 50_000))).collect();
        for one in many {
            one.join().expect("it does not panic")?;
        }
        let mut stream = TcpStream::connect(("127.0.0.1", refused))?;
        stream.set_read_timeout(Some(berth_e2e::up::PATIENCE))?;
        ensure!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)), "nothing listens there");
        let mut errors = BufReader::new(forward.stderr.take().context("there are errors")?).lines();
        let error = errors.find(|line| line.as_ref().is_ok_and(|line| line.contains("an error occurred")));
        says(&error.context("kubectl ended")??, "refused")?;
        interrupt(&mut forward)?;
    }
    machine.finish()
}

#[test]
fn files_are_copied_and_containers_added_for_debugging() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply(&pod("one", "exec sleep 1000000", ""))?;
    machine.ready("one")?;
    let (from, back) = (machine.dir().join("from"), machine.dir().join("back"));
    std::fs::create_dir_all(from.join("deep"))?;
    let content = "x".repeat(300_000);
    std::fs::write(from.join("deep/file"), &content)?;
    machine.kubectl(&["cp", &from.to_string_lossy(), "one:/tmp/copied"])?;
    ensure!(machine.exec("one", "wc -c < /tmp/copied/deep/file")?.trim() == "300000");
    machine.kubectl(&["cp", "one:/tmp/copied", &back.to_string_lossy()])?;
    ensure!(std::fs::read_to_string(back.join("deep/file"))? == content);

    let said = machine.kubectl_with(
        &["debug", "-i", "one", "--image=busybox", "--container=helper", "--", "head", "-n1"],
        "typed\n",
    )?;
    says(&said, "typed")?;
    let jsonpath = "jsonpath={.status.ephemeralContainerStatuses[0].state.terminated.exitCode}=0";
    machine.wait("pod/one", jsonpath)?;
    machine.kubectl(&[
        "debug",
        "one",
        "--image=busybox",
        "--container=shell",
        "--attach=false",
        "--quiet",
    ])?;
    machine.until("the shell has ended", || {
        let one = machine.get("pod/one")?;
        let state = one.pointer("/status/ephemeralContainerStatuses/1/state/terminated/reason");
        Ok((state.and_then(|reason| reason.as_str()) == Some("Completed")).then_some(()))
    })?;
    ensure!(machine.kubectl(&["logs", "one", "-c", "helper"])?.contains("typed"));
    let one = machine.get("pod/one")?;
    ensure!(text(&one, "/status/phase") == "Running", "{one}");
    machine.finish()
}

#[test]
fn limits_are_kept_counted_and_leave_no_group_behind() -> Result<()> {
    let mut machine = Machine::start_with(&["--pod-pids-limit", "200"])?;
    let limits = "    resources: {limits: {memory: 32Mi, cpu: 200m}}\n";
    machine.apply(&pod("greedy", "exec tail /dev/zero", limits))?;
    machine.apply(&pod("busy", "while :; do :; done", limits))?;
    machine
        .wait("pod/greedy", "jsonpath={.status.containerStatuses[0].state.terminated.reason}=OOMKilled")?;
    let greedy = machine.get("pod/greedy")?;
    ensure!(greedy["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137, "{greedy}");
    ensure!(greedy["status"]["qosClass"] == "Guaranteed", "{greedy}");

    // It may take a fifth of a processor, and tries to take all of it.
    machine.ready("busy")?;
    machine.kubectl(&["top", "pod"])?;
    thread::sleep(Duration::from_secs(1));
    let top = machine.kubectl(&["top", "pod", "busy", "--no-headers", "--containers"])?;
    let words: Vec<&str> = top.split_whitespace().collect();
    let [pod, container, cpu, memory] = words[..] else { anyhow::bail!("{top}") };
    let cpu: u32 = cpu.strip_suffix('m').context("thousandths of a processor")?.parse()?;
    ensure!((pod, container) == ("busy", "main") && (50..=260).contains(&cpu), "{top}");
    ensure!(memory.ends_with("Mi"), "{top}");
    says(&machine.kubectl(&["top", "node"])?, NODE)?;
    let selected = machine.kubectl(&["top", "pod", "-l", "app=none"]);
    ensure!(selected.is_ok_and(|text| !text.contains("busy")), "no pod has this label");
    let path = format!("/api/v1/nodes/{NODE}/proxy/stats/summary");
    let summary: serde_json::Value = serde_json::from_str(&machine.kubectl(&["get", "--raw", &path])?)?;
    let pods = summary["pods"].as_array().context("there are pods")?;
    let busy = pods.iter().find(|pod| pod["podRef"]["name"] == "busy").context("busy is there")?;
    ensure!(busy["memory"]["workingSetBytes"].as_u64() > Some(0), "{busy}");
    ensure!(busy["containers"][0]["cpu"]["usageCoreNanoSeconds"].as_u64() > Some(0), "{busy}");
    ensure!(summary["node"]["cpu"]["usageNanoCores"].as_u64() > Some(0), "{summary}");

    let groups = || berth_e2e::up::Leftovers::of(machine.dir()).map(|left| left.groups);
    let before = groups()?;
    ensure!(before.iter().any(|group| group.ends_with("main_0")), "{before:?}");
    machine.kill()?;
    machine.restart()?;
    machine.ready("busy")?;
    let after = berth_e2e::up::Leftovers::of(machine.dir())?.groups;
    ensure!(after == before, "{before:?} became {after:?}");
    machine.kubectl(&["delete", "pod", "--all"])?;
    machine.finish()
}

#[test]
fn a_machine_without_control_groups_says_so() -> Result<()> {
    let machine = Machine::start_after("umount --recursive --lazy /sys/fs/cgroup")?;
    machine.apply(&pod("limited", "exec sleep 1000000", "    resources: {limits: {memory: 32Mi}}\n"))?;
    machine.apply(&pod("free", "exec sleep 1000000", ""))?;
    machine.ready("limited")?;
    machine.ready("free")?;
    let event = machine.event("Pod", "limited", "LimitsNotEnforced")?;
    says(&event, "resources.limits of cpu and memory are not enforced: this machine has no control group")?;
    ensure!(!machine.kubectl(&["get", "events"])?.contains("pod/free LimitsNotEnforced"));
    // Figures come from /proc then.
    machine.kubectl(&["top", "pod"])?;
    says(&machine.kubectl(&["top", "pod"])?, "limited")?;
    machine.finish()
}

#[test]
fn a_chatty_pod_takes_five_files_and_its_log_is_read_as_one() -> Result<()> {
    let machine = Machine::start()?;
    // Some 65 MB, in lines of a thousand bytes that begin with their number.
    let script = "tail=$(printf '%0970d' 0); yes $tail | head -n 65000 | nl -w 5 -s ' '; sleep 2; echo last; exec sleep 1000000";
    machine.apply(&pod("chatty", script, ""))?;
    machine.ready("chatty")?;
    // A follower sees the last line, however often the file is changed on the way.
    let mut follow =
        machine.kubectl_command(&["logs", "-f", "--tail=1", "chatty"]).stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(follow.stdout.take().context("there is output")?).lines();
    let last = lines.find(|line| line.as_ref().is_ok_and(|line| line == "last"));
    last.context("the log ended")??;
    interrupt(&mut follow)?;

    let all = machine.kubectl(&["logs", "chatty"])?;
    ensure!(all.len() > 40 << 20, "{} bytes of the log are left", all.len());
    let numbers: Vec<u32> =
        all.lines().filter_map(|line| line.split_whitespace().next()?.parse().ok()).collect();
    ensure!(numbers.last() == Some(&65_000) && numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]));
    let tail = machine.kubectl(&["logs", "chatty", "--tail=30000"])?;
    ensure!(tail.lines().count() == 30_000 && all.ends_with(&tail));
    ensure!(machine.kubectl(&["logs", "chatty", "--tail=2", "--limit-bytes=9"])?.len() == 9);
    ensure!(machine.kubectl(&["logs", "chatty", "--since=1h"])?.len() == all.len());
    let stamped = machine.kubectl(&["logs", "chatty", "--tail=1", "--timestamps"])?;
    let (time, line) = stamped.trim_end().split_once(' ').context("a time and a line")?;
    ensure!(line == "last", "{stamped}");
    let since = machine.kubectl(&["logs", "chatty", &format!("--since-time={time}")])?;
    ensure!(since == "last\n", "{} bytes since then", since.len());
    let logs = machine.data().join("node/logs");
    let used = String::from_utf8(berth_e2e::machine::command("du").arg("-sm").arg(&logs).output()?.stdout)?;
    let used: u32 = used.split_whitespace().next().context("a size")?.parse()?;
    ensure!(used <= 54, "the logs take {used} MB");
    machine.finish()
}
