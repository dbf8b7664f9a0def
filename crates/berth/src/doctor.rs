//! `berth doctor`: examines the storage of any cluster, and says what is wrong and what to do.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use berth_ui::fix::{self, Outcome};
use berth_ui::{ClusterState, Finding, Severity, counted, diagnose, printable};
use clap::Args as ClapArgs;
use serde_json::json;

use crate::machine::ClusterArgs;
use crate::sidecars::go;

/// Find what is wrong with a cluster's storage, with the cause and what to do.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Exit status: 0 nothing needs a person, 1 something does, or an error, 2 wrong command line"
)]
pub(crate) struct Args {
    /// Look at the claims, pods and snapshots of one namespace only
    #[arg(long, short = 'n', value_name = "NAMESPACE")]
    namespace: Option<String>,

    /// How to print what is found
    #[arg(long, short = 'o', value_enum, default_value_t = Format::Text)]
    output: Format,

    /// Repair what is provably safe to repair, and say what was done
    #[arg(long, conflicts_with = "namespace")]
    fix: bool,

    /// How long something may be without a sign of progress before it is reported
    #[arg(long, default_value = "2m", value_parser = go::duration, value_name = "DURATION")]
    patience: Duration,

    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Text,
    Json,
}

/// Prints the findings; the exit status says whether anything needs a person.
pub(crate) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (cluster, _) = args.cluster.connect().await?;
    let read = || async {
        let state = ClusterState::read(&cluster, args.namespace.as_deref()).await;
        let mut state = ClusterState { patience: args.patience, ..state.context("read the cluster")? };
        state.measure(&cluster).await;
        anyhow::Ok(state)
    };
    let mut state = read().await?;
    let mut findings = diagnose(&state);
    let mut repaired = Vec::new();
    if args.fix {
        for finding in findings.iter().filter(|finding| finding.fix.is_some()) {
            let done = fix::apply(&cluster, finding, args.patience).await;
            repaired.push(match done.with_context(|| format!("repair {}", finding.object))? {
                Some(Outcome::Done(what)) => what,
                Some(Outcome::NotNeeded) | None => {
                    format!("left {} alone: it has changed meanwhile", finding.object)
                }
            });
        }
        if !repaired.is_empty() {
            state = read().await?;
            findings = diagnose(&state);
        }
    }
    match args.output {
        Format::Text => print!("{}", text(&state, &findings, &repaired)),
        Format::Json => println!("{}", json(&state, &findings, &repaired)),
    }
    Ok(if berth_ui::diagnose::needs_a_person(&findings) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn json(state: &ClusterState, findings: &[Finding], repaired: &[String]) -> String {
    let report = json!({
        "findings": findings,
        "unreadable": state.unreadable,
        "repaired": repaired,
        "examined": {
            "claims": state.claims.len(),
            "volumes": state.volumes.len(),
            "pods": state.pods.len(),
            "attachments": state.attachments.len(),
            "snapshots": state.snapshots.len(),
            "nodes": state.nodes.len(),
            "drivers": state.drivers.len(),
        },
    });
    format!("{report:#}")
}

fn text(state: &ClusterState, findings: &[Finding], repaired: &[String]) -> String {
    let mut lines = Vec::new();
    lines.extend(repaired.iter().map(|what| format!("Repaired: {what}")));
    for unreadable in &state.unreadable {
        lines.push(format!("Not examined: {}: {}", unreadable.kind, unreadable.why));
    }
    if !lines.is_empty() {
        lines.push(String::new());
    }
    for finding in findings {
        lines.push(format!("{:<7}  {}  ({})", finding.severity, finding.object, finding.trouble));
        lines.push(format!("  cause     {}", finding.cause));
        lines.extend(finding.evidence.iter().map(|fact| format!("  evidence  {fact}")));
        lines.push(format!("  to do     {}", finding.what_to_do));
        lines.extend(finding.command.iter().map(|command| format!("  command   {command}")));
        lines.push(String::new());
    }
    let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
    let examined = [
        counted(state.claims.len(), "claim"),
        counted(state.volumes.len(), "volume"),
        counted(state.pods.len(), "pod"),
        counted(state.attachments.len(), "attachment"),
        counted(state.snapshots.len(), "snapshot"),
        counted(state.nodes.len(), "node"),
        counted(state.drivers.len(), "driver"),
    ]
    .join(", ");
    let [errors, warnings, notes] = [Severity::Error, Severity::Warning, Severity::Note].map(count);
    lines.push(if findings.is_empty() {
        format!("No problems found: {examined} examined.")
    } else {
        let found =
            [counted(errors, "error"), counted(warnings, "warning"), counted(notes, "note")].join(", ");
        format!("{found}; {examined} examined.")
    });
    lines.push(String::new());
    // Messages of others must not change the terminal.
    lines.iter().map(|line| printable(line)).collect::<Vec<_>>().join("\n")
}
