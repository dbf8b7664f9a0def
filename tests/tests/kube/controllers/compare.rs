//! Each scenario runs twice at once: on Kubernetes' API server with kube-controller-manager and kube-scheduler, and on Berth's with
//! Berth's loops, with the same nodes on both (`kubelet.rs`). At its checkpoints the objects and the events are the same, but for
//! what `differences.rs` lists with its reason.

mod budgets;
mod cron_jobs;
mod daemon_sets;
mod deployments;
mod differences;
mod jobs;
mod kubelet;
mod nodes;
mod normal;
mod scheduling;
mod side;
mod stateful_sets;

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use differences::{ObservedCheckpoint, differences, judge};
use kubelet::OUTCOME;
use side::Side;

use crate::kinds::text;

/// Runs a scenario on both sides, and compares what there is at its checkpoints.
async fn compare(name: &str, scenario: impl AsyncFn(&mut Side) -> Result<()>) -> Result<()> {
    let run = async |mut side: Side| {
        let ran = scenario(&mut side).await;
        let of = side.name;
        let finished = side.finish().await;
        ran.with_context(|| format!("the scenario on {of}"))?;
        finished.with_context(|| format!("take everything away on {of}"))
    };
    let (real, ours) = (Side::kubernetes(name).await?, Side::berth(name).await?);
    let (real, ours) = tokio::join!(run(real), run(ours));
    let ((real_names, real), (our_names, ours)) = (real?, ours?);
    ensure!(!real.is_empty() && real.len() == ours.len(), "both sides have the same checkpoints");
    let (real_words, our_words) = (real_names.words(), our_names.words());
    let (mut found, mut kinds) = (Vec::new(), BTreeSet::from(["Event"]));
    for (real, ours) in real.iter().zip(&ours) {
        let seen = [
            ObservedCheckpoint { checkpoint: real, words: &real_words },
            ObservedCheckpoint { checkpoint: ours, words: &our_words },
        ];
        let all = differences(&seen[0], &seen[1]);
        found.extend(all.into_iter().map(|difference| (real.name.clone(), difference)));
        kinds.extend(
            real.objects.iter().filter(|(_, objects)| !objects.is_empty()).map(|(kind, _)| kind.name),
        );
    }
    let complaints = judge(name, &kinds, &found);
    ensure!(complaints.is_empty(), "{} differences:\n  {}", complaints.len(), complaints.join("\n  "));
    Ok(())
}

/// A template of pods with the label `app`, of one container with an image, that end as [`OUTCOME`] says. Templates of different
/// images are different revisions.
fn template(app: &str, image: &str, outcome: &str) -> Value {
    json!({
        "metadata": {"labels": {"app": app}, "annotations": {OUTCOME: outcome}},
        "spec": {"terminationGracePeriodSeconds": 5, "containers": [{"name": "main", "image": image}]},
    })
}

fn image(pod: &Value) -> &str {
    text(pod, "/spec/containers/0/image")
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"))
}
