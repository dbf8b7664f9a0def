//! `berth status`: what runs, and what needs attention.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context as _, bail};
use berth_kube::Cluster;
use clap::Args as ClapArgs;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::CSINode;
use kube::ResourceExt as _;

use crate::machine::{self, DataDirArg, Running};
use crate::ui;

/// What runs in a data directory, and what needs attention.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    directory: DataDirArg,
}

/// Prints it; exits with an error if nothing runs.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let data_dir = &args.directory.data_dir;
    let running = match Running::find(data_dir) {
        Ok(Some(running)) => running,
        Ok(None) => bail!("no berth runs in {}; `berth up` starts one", data_dir.display()),
        Err(error) => bail!("cannot read {}: {error}. Use sudo", data_dir.display()),
    };
    let cluster = machine::connect(&running).await?;
    println!("Berth runs in {} (process {}), started {} ago", data_dir.display(), running.pid, age(&running));
    println!("  API         https://{}", running.address);
    if let Some(link) = running.ui.and_then(|address| ui::link(data_dir, address)) {
        println!("  page        {link}");
    }
    println!("  kubeconfig  {}", running.kubeconfig.display());
    print!("{}", problems(&cluster).await?);
    print!("{}", nodes(&cluster).await?);
    print!("{}", counts(&cluster).await?);
    Ok(())
}

fn age(running: &Running) -> String {
    let seconds = Timestamp::now().duration_since(running.started).as_secs().max(0);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

/// What the API server says of itself, if it is not well: records that are damaged or missing.
async fn problems(cluster: &Cluster) -> anyhow::Result<String> {
    let request = hyper::Request::get("/readyz").body(kube::client::Body::empty())?;
    let answer = cluster.client().send(request).await.context("ask the API server whether it is well")?;
    if answer.status().is_success() {
        return Ok(String::new());
    }
    let said = answer.into_body().collect_bytes().await.context("read its answer")?;
    let said = String::from_utf8_lossy(&said);
    let failed = said.lines().filter_map(|line| line.strip_prefix("[-]"));
    let mut text = String::new();
    for line in failed {
        let _ = writeln!(text, "  NOT WELL    {line}");
    }
    Ok(text)
}

async fn nodes(cluster: &Cluster) -> anyhow::Result<String> {
    let drivers: Vec<CSINode> = cluster.fetch_all("").await?;
    let nodes: Vec<Node> = cluster.fetch_all("").await?;
    let mut text = String::new();
    for node in nodes {
        let name = node.name_any();
        let names: Vec<&str> = drivers
            .iter()
            .filter(|drivers| drivers.name_any() == name)
            .flat_map(|drivers| drivers.spec.drivers.iter().map(|driver| driver.name.as_str()))
            .collect();
        let ready = if machine::is_ready(&node) { "ready" } else { "NOT READY" };
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let _ = writeln!(text, "  node        {name}: {ready}; drivers: {names}");
    }
    Ok(text)
}

async fn counts(cluster: &Cluster) -> anyhow::Result<String> {
    let claims: Vec<PersistentVolumeClaim> = cluster.fetch_all("").await?;
    let volumes: Vec<PersistentVolume> = cluster.fetch_all("").await?;
    let pods: Vec<Pod> = cluster.fetch_all("").await?;
    let phase = |phase: Option<&String>| phase.cloned().unwrap_or_else(|| "Pending".to_owned());
    let of_claims =
        claims.iter().map(|claim| phase(claim.status.as_ref().and_then(|status| status.phase.as_ref())));
    let of_volumes =
        volumes.iter().map(|volume| phase(volume.status.as_ref().and_then(|status| status.phase.as_ref())));
    let of_pods = pods.iter().map(|pod| phase(pod.status.as_ref().and_then(|status| status.phase.as_ref())));
    let mut text = format!("  claims      {}\n", tally(of_claims));
    let _ = writeln!(text, "  volumes     {}", tally(of_volumes));
    let _ = writeln!(text, "  pods        {}", tally(of_pods));
    let waiting = claims
        .iter()
        .filter(|claim| claim.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Bound"));
    for claim in waiting.take(10) {
        let namespace = claim.namespace().unwrap_or_default();
        let _ = write!(
            text,
            "\nNot bound: {namespace}/{name} (berth explain -n {namespace} pvc/{name})",
            name = claim.name_any()
        );
    }
    if text.contains("\nNot bound") {
        text.push('\n');
    }
    Ok(text)
}

fn tally(phases: impl Iterator<Item = String>) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for phase in phases {
        *counts.entry(phase).or_default() += 1;
    }
    if counts.is_empty() {
        return "none".to_owned();
    }
    counts.into_iter().map(|(phase, count)| format!("{count} {phase}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_counted() {
        let phases = ["Bound", "Pending", "Bound"].map(str::to_owned);
        assert_eq!(tally(phases.into_iter()), "2 Bound, 1 Pending");
        assert_eq!(tally(std::iter::empty()), "none");
    }
}
