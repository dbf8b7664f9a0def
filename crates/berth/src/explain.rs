//! `berth explain pvc/NAME`: a volume's timeline, and for one that is stuck, why and what to do.

mod diagnose;
mod observe;

use anyhow::bail;
use clap::Args as ClapArgs;
use jiff::Timestamp;

use self::observe::Observed;
use crate::machine::Where;
use crate::timeline::{self, Step};

pub(crate) use self::diagnose::{Diagnosis, diagnose};

/// Tell what happened to a volume, and what it waits for.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// What to explain: pvc/NAME, pv/NAME or pod/NAME
    #[arg(value_name = "KIND/NAME")]
    what: String,

    /// The namespace of a claim or pod
    #[arg(long, short = 'n', default_value = "default")]
    namespace: String,

    #[command(flatten)]
    api: Where,
}

/// The objects that can be explained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Claim,
    Volume,
    Pod,
}

/// Prints the explanation.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let (kind, name) = parse(&args.what)?;
    let client = args.api.client().await?;
    let observed = observe::observe(&client, kind, &args.namespace, name).await?;
    let steps = match &args.api.kubeconfig {
        None => timeline::read(&args.api.place.data_dir, |step| observed.concerns(step)),
        Some(_) => Vec::new(),
    };
    print!("{}", text(&observed, &steps, Timestamp::now()));
    Ok(())
}

fn parse(what: &str) -> anyhow::Result<(Kind, &str)> {
    let Some((kind, name)) = what.split_once('/') else {
        bail!("{what:?} names no kind: write pvc/{what}, pv/{what} or pod/{what}");
    };
    let kind = match kind {
        "pvc" | "persistentvolumeclaim" | "persistentvolumeclaims" => Kind::Claim,
        "pv" | "persistentvolume" | "persistentvolumes" => Kind::Volume,
        "pod" | "po" | "pods" => Kind::Pod,
        other => bail!("there is nothing to explain about a {other}; pvc, pv and pod can be explained"),
    };
    if name.is_empty() {
        bail!("the name is missing after {what}");
    }
    Ok((kind, name))
}

fn text(observed: &Observed, steps: &[Step], now: Timestamp) -> String {
    let mut lines = vec![observed.headline(), String::new()];
    let rows = rows(observed, steps);
    for row in &rows {
        lines.push(row.clone());
    }
    if !rows.is_empty() {
        lines.push(String::new());
    }
    match diagnose(observed, now) {
        Diagnosis { stuck: false, why, .. } => lines.push(why),
        Diagnosis { why, what_to_do, .. } => {
            lines.push(format!("Stuck: {why}"));
            lines.extend(what_to_do.map(|advice| format!("What to do: {advice}")));
        }
    }
    lines.push(String::new());
    lines.join("\n")
}

/// One line per step, relative to the first thing that happened.
fn rows(observed: &Observed, steps: &[Step]) -> Vec<String> {
    let mut moments: Vec<(Timestamp, [String; 5])> = observed
        .moments()
        .into_iter()
        .map(|(time, state, who, what)| (time, [state, who, what, String::new(), String::new()]))
        .collect();
    for step in steps {
        let took = format!("{:.1} ms", step.duration().as_secs_f64() * 1000.0);
        let error = if step.error.is_empty() { String::new() } else { format!("failed: {}", step.error) };
        moments
            .push((step.time, [step.state.clone(), step.component.clone(), step.call.clone(), took, error]));
    }
    moments.sort_by_key(|(time, _)| *time);
    let Some(first) = moments.first().map(|(time, _)| *time) else { return Vec::new() };
    let mut rows =
        vec![format!("{:>12}  {:<11} {:<24} {:<28} {:>10}", "after", "state", "component", "call", "took")];
    rows.extend(moments.into_iter().map(|(time, [state, who, what, took, error])| {
        let after = (time.as_nanosecond() - first.as_nanosecond()) / 1_000_000;
        let after = format!("{}.{:03} s", after / 1000, after % 1000);
        format!("{after:>12}  {state:<11} {who:<24} {what:<28} {took:>10}  {error}").trim_end().to_owned()
    }));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_to_be_explained_is_said_as_with_kubectl() {
        assert_eq!(parse("pvc/data").unwrap(), (Kind::Claim, "data"));
        assert_eq!(parse("pod/web").unwrap(), (Kind::Pod, "web"));
        assert!(parse("data").unwrap_err().to_string().contains("pvc/data"));
        assert!(parse("sc/x").is_err());
        assert!(parse("pv/").is_err());
    }
}
