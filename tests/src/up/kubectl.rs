//! kubectl against a machine: what a person does.

use std::{
    io::Write as _,
    process::{Command, Output, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Machine, texts};
use crate::machine;

/// How long kubectl waits for something; less than a test's patience, so that the reason is shown.
const WAIT: &str = "--timeout=45s";

impl Machine {
    /// kubectl with this machine's kubeconfig, and a home of its own.
    pub fn kubectl_command(&self, args: &[&str]) -> Command {
        let mut kubectl = machine::command(program());
        kubectl.args(args).env("KUBECONFIG", self.data().join("apiserver/kubeconfig"));
        kubectl.env("HOME", self.dir()).stdin(Stdio::null());
        kubectl
    }

    /// Runs kubectl; gives what it printed, or its complaint as the error.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        let output = self.kubectl_command(args).output().context("start kubectl")?;
        succeeded(args, &output)
    }

    /// Runs kubectl with this on its standard input.
    pub fn kubectl_with(&self, args: &[&str], input: &str) -> Result<String> {
        let mut kubectl = self.kubectl_command(args);
        kubectl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = kubectl.spawn().context("start kubectl")?;
        child.stdin.take().context("standard input was asked for")?.write_all(input.as_bytes())?;
        succeeded(args, &child.wait_with_output()?)
    }

    /// Applies a manifest with kubectl.
    pub fn apply(&self, manifest: &str) -> Result<()> {
        self.kubectl_with(&["apply", "-f", "-"], manifest).map(drop)
    }

    /// Applies an example as it is in the repository.
    pub fn apply_example(&self, name: &str) -> Result<()> {
        let path = format!("{}/../examples/{name}", env!("CARGO_MANIFEST_DIR"));
        self.kubectl(&["apply", "-f", &path]).map(drop)
    }

    /// An object, such as `pvc/data` or `-n foo pvc/data`.
    pub fn get(&self, what: &str) -> Result<Value> {
        let mut args = vec!["get", "-o", "json"];
        args.extend(what.split(' '));
        Ok(serde_json::from_str(&self.kubectl(&args)?)?)
    }

    /// Waits, by a watch, until an object is so: `kubectl wait --for`.
    pub fn wait(&self, what: &str, so: &str) -> Result<()> {
        let so = format!("--for={so}");
        let mut args = vec!["wait", &so, WAIT];
        args.extend(what.split(' '));
        let waited = self.kubectl(&args);
        waited.with_context(|| self.describe(what).unwrap_or_default()).map(drop)
    }

    /// Waits until a pod is ready.
    pub fn ready(&self, pod: &str) -> Result<()> {
        self.wait(&format!("pod/{pod}"), "condition=Ready")
    }

    /// Deletes objects and waits until they are gone.
    pub fn delete(&self, what: &str) -> Result<()> {
        let mut args = vec!["delete", WAIT, "--ignore-not-found"];
        args.extend(what.split(' '));
        self.kubectl(&args).map(drop)
    }

    /// What `kubectl describe` says of an object.
    pub fn describe(&self, what: &str) -> Result<String> {
        let mut args = vec!["describe"];
        args.extend(what.split(' '));
        self.kubectl(&args)
    }

    /// Waits until an object has an event for this reason; gives its message.
    pub fn event(&self, kind: &str, name: &str, reason: &str) -> Result<String> {
        let of = format!("involvedObject.kind={kind},involvedObject.name={name},reason={reason}");
        self.until(&format!("{kind} {name} has an event {reason}"), || {
            let events = self.kubectl(&["get", "events", "-A", "-o", "json", "--field-selector", &of])?;
            let events: Value = serde_json::from_str(&events)?;
            Ok(events["items"][0]["message"].as_str().map(str::to_owned))
        })
    }

    /// Runs a script in a pod's container; gives what it printed.
    pub fn exec(&self, pod: &str, script: &str) -> Result<String> {
        let mut args = vec!["exec"];
        args.extend(pod.split(' '));
        args.extend(["--", "sh", "-c", script]);
        self.kubectl(&args)
    }

    /// Runs a script in a pod's container by which the container ends. It may be killed along with the container.
    pub fn exec_last(&self, pod: &str, script: &str) -> Result<()> {
        match self.exec(pod, script) {
            Err(error) if !format!("{error:#}").contains("exit code 137") => Err(error),
            _ => Ok(()),
        }
    }

    /// Repeats a script in a pod's container until it prints what is wanted: a pod that is ready may not have written yet.
    pub fn exec_until(&self, pod: &str, script: &str, wanted: impl Fn(&str) -> bool) -> Result<String> {
        let mut last = String::new();
        let found = self.until(&format!("{script:?} prints in {pod} what is wanted"), || {
            let printed = self.exec(pod, script);
            last = printed.as_ref().map_or_else(|error| format!("{error:#}"), Clone::clone);
            Ok(printed.ok().filter(|printed| wanted(printed)))
        });
        found.with_context(|| format!("in the end there was {last:?}"))
    }
}

/// kubectl from PATH, or the one that was built for the tests.
pub fn program() -> std::path::PathBuf {
    let home = std::env::var_os("HOME").unwrap_or_default();
    let built = std::env::var_os("KUBE_BIN")
        .map_or_else(|| std::path::Path::new(&home).join(".cache/kube-testbed/bin"), Into::into)
        .join("kubectl");
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&paths).any(|dir| dir.join("kubectl").is_file());
    if !on_path && built.is_file() { built } else { "kubectl".into() }
}

fn succeeded(args: &[&str], output: &Output) -> Result<String> {
    let (printed, complaint) = texts(output);
    ensure!(
        output.status.success(),
        "kubectl {} ended with {}: {complaint}{printed}",
        args.join(" "),
        output.status
    );
    Ok(printed)
}
