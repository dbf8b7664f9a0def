//! Berth's API server answers as kube-apiserver does: the same requests, the same answers.
//!
//! `tests/server/differential/corpus` holds the requests, `golden.jsonl` what kube-apiserver v1.36 answered to them. The
//! short form compares Berth with these records; the long form (`make test-kube`) asks the real server, too, and with
//! `BERTH_RECORD=1` writes the records anew. What differs and may is marked in the corpus and explained in
//! `DIFFERENCES.md`.

mod answer;
mod compare;
mod corpus;
mod kubectl;
mod normal;
mod peers;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use self::answer::Answer;
use self::corpus::Step;
use self::peers::{Berth, Peer, Real};

fn here() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/server/differential")
}

/// Answers to all steps, in their order.
async fn play(peer: &Peer, steps: &[Step]) -> Vec<Answer> {
    let mut saved = BTreeMap::new();
    let mut answers = Vec::with_capacity(steps.len());
    for step in steps {
        answers.push(answer::ask(peer, step, &mut saved).await);
    }
    answers
}

fn read_golden() -> Vec<(String, Answer)> {
    let text = std::fs::read_to_string(here().join("golden.jsonl")).expect("the recorded answers are there");
    text.lines().map(|line| serde_json::from_str(line).expect("a recorded answer is JSON")).collect()
}

fn write_golden(steps: &[Step], answers: &[Answer]) {
    let lines: Vec<String> = steps
        .iter()
        .zip(answers)
        .filter(|(step, _)| !step.setup)
        .map(|(step, answer)| serde_json::to_string(&(&step.id, answer)).expect("an answer is JSON"))
        .collect();
    std::fs::write(here().join("golden.jsonl"), lines.join("\n") + "\n").expect("the records can be written");
}

#[tokio::test]
async fn berth_answers_what_the_real_server_was_recorded_to_answer() {
    let steps = corpus::read(&here().join("corpus"));
    let berth = Berth::start().await;
    let got = play(&Peer::Berth(berth), &steps).await;
    let golden: BTreeMap<String, Answer> = read_golden().into_iter().collect();
    let compared = steps.iter().zip(&got).filter(|(step, _)| !step.setup);
    let pairs: Vec<_> = compared.map(|(step, got)| (step, golden.get(&step.id), got)).collect();
    assert!(pairs.len() >= 300, "only {} requests", pairs.len());
    compare::assert_equal(&pairs);
}

#[tokio::test]
#[ignore = "needs the real servers: make test-kube"]
async fn berth_answers_what_the_real_server_answers_now() {
    let steps = corpus::read(&here().join("corpus"));
    let wanted = play(&Peer::Real(Real::connect()), &steps).await;
    if std::env::var_os("BERTH_RECORD").is_some() {
        write_golden(&steps, &wanted);
    }
    let got = play(&Peer::Berth(Berth::start().await), &steps).await;
    let pairs: Vec<_> = steps
        .iter()
        .zip(&wanted)
        .zip(&got)
        .filter(|((step, _), _)| !step.setup)
        .map(|((step, wanted), got)| (step, Some(wanted), got))
        .collect();
    compare::assert_equal(&pairs);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs the real servers: make test-kube"]
async fn kubectl_prints_the_same_for_both_servers() {
    kubectl::compare().await;
}
