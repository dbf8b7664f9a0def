//! CSI calls in full, without secrets: kept in a file by `berth up`, shown by `berth logs --calls`.
//!
//! Whoever calls a driver emits each call as a log event (`berth_csi::full`). A lost or torn line costs one call of the account, so
//! nothing is synced.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use berth_kube::storage::{csi_source, volume_name};
use berth_kube::{Cluster, Key};
use berth_ui::records::{CALLS, CallRecord, read_lines};
use clap::Args as ClapArgs;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use parking_lot::Mutex;

use crate::machine::{ClusterArgs, default_data_dir};
use crate::timeline::{Fields, LineFile};
use crate::up;

/// Show what a machine logged, or the CSI calls that were made on it.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Show CSI calls with request and answer, oldest first; secrets are removed
    #[arg(long)]
    calls: bool,

    /// With --calls, only those about this volume: pvc/NAME or pv/NAME
    #[arg(value_name = "KIND/NAME", requires = "calls")]
    what: Option<String>,

    /// The namespace of the claim
    #[arg(long, short = 'n', default_value = "default")]
    namespace: String,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Keeps calls; cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct CallRecorder {
    files: Arc<Mutex<Vec<LineFile>>>,
}

impl CallRecorder {
    /// Writes what comes from now on to this file.
    pub(crate) fn keep(&self, file: LineFile) {
        self.files.lock().push(file);
    }

    /// Takes in a log event of `berth_csi::full`.
    pub(crate) fn take(&self, event: &tracing::Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut text = |name: &str| fields.texts.remove(name).unwrap_or_default();
        // A driver of this machine emits the same call again.
        if text("side") != "caller" {
            return;
        }
        let call = CallRecord {
            time: Timestamp::now(),
            driver: text("driver"),
            method: text("method"),
            request: text("request"),
            response: text("response"),
            code: text("code"),
            error: text("error"),
            duration_us: fields.duration_us,
        };
        // Asked all day long, and never about a volume.
        if call.code == "OK"
            && ["/csi.v1.Identity/Probe", "/csi.v1.Controller/GetCapacity"].contains(&call.method.as_str())
        {
            return;
        }
        for file in self.files.lock().iter_mut() {
            if let Err(error) = file.write(&call) {
                tracing::debug!(%error, "a call is missing in the account");
            }
        }
    }
}

/// A call as people read it.
fn text(call: &CallRecord) -> String {
    #[expect(clippy::cast_precision_loss, reason = "it is shown with one digit")]
    let took = call.duration_us as f64 / 1000.0;
    let method = call.method.strip_prefix("/csi.v1.").unwrap_or(&call.method);
    let mut text = format!(
        "{} {} {method} {} {took:.1} ms\n  request   {}\n",
        call.time, call.driver, call.code, call.request
    );
    // Writing to memory does not fail.
    let _ = match (call.error.is_empty(), call.response.is_empty()) {
        (false, _) => writeln!(text, "  error     {}", call.error),
        (true, false) => writeln!(text, "  response  {}", call.response),
        (true, true) => Ok(()),
    };
    text
}

/// Prints the log or the calls.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let (cluster, data_dir) = match args.cluster.connect().await {
        Ok((cluster, data_dir)) => (Some(cluster), data_dir),
        // What was logged can be read when nothing runs any more.
        Err(_) if args.what.is_none() && args.cluster.data_dir().is_some_and(Path::exists) => {
            (None, args.cluster.data_dir().map(Path::to_owned))
        }
        Err(error) => return Err(error),
    };
    let Some(data_dir) = data_dir else {
        bail!(
            "calls and logs are kept by `berth up` on its own machine: give its --data-dir [default: {}]",
            default_data_dir().display()
        );
    };
    let mut out = std::io::stdout().lock();
    if !args.calls {
        let log = data_dir.join(up::LOG);
        let text = std::fs::read_to_string(&log)
            .with_context(|| format!("read {}: only `berth up --detach` writes a log", log.display()))?;
        out.write_all(text.as_bytes())?;
        return Ok(());
    }
    let quoted = match (&args.what, &cluster) {
        (Some(what), Some(cluster)) => Some(names(cluster, what, &args.namespace).await?),
        _ => None,
    };
    for call in read_lines::<CallRecord>(data_dir.join(CALLS)) {
        if quoted.as_ref().is_none_or(|quoted| call.concerns(quoted)) {
            out.write_all(text(&call).as_bytes())?;
        }
    }
    Ok(())
}

/// What stands in the calls about a volume, in quotes.
async fn names(cluster: &Cluster, what: &str, namespace: &str) -> anyhow::Result<BTreeSet<String>> {
    let (kind, name) = what
        .split_once('/')
        .with_context(|| format!("{what:?} names no kind: write pvc/{what} or pv/{what}"))?;
    let mut quoted = BTreeSet::new();
    let volume = match kind {
        "pvc" => {
            let claim = cluster.fetch::<PersistentVolumeClaim>(&Key::new(namespace, name)).await?;
            let Some(claim) = claim else { bail!("there is no claim {name} in the namespace {namespace}") };
            // A volume that was not made yet has the name that it will have.
            let uid = claim.metadata.uid.clone().unwrap_or_default();
            quoted.insert(format!("\"pvc-{uid}\""));
            volume_name(&claim).to_owned()
        }
        "pv" => name.to_owned(),
        other => bail!("there are no calls about a {other}; pvc and pv have some"),
    };
    if volume.is_empty() {
        return Ok(quoted);
    }
    if let Some(found) = cluster.fetch::<PersistentVolume>(&Key::cluster(volume.as_str())).await? {
        quoted.extend(csi_source(&found).map(|csi| format!("{:?}", csi.volume_handle)));
    } else if kind == "pv" {
        bail!("there is no volume {name}");
    }
    quoted.insert(format!("{volume:?}"));
    Ok(quoted)
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;
    use crate::timeline::TimelineRecorder;

    #[test]
    fn the_calls_of_callers_are_kept_and_those_about_a_volume_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let keeper = TimelineRecorder::new();
        keeper.keep_in(dir.path()).unwrap();
        let emit = |side: &str, request: &str| {
            tracing::debug!(target: berth_csi::full::TARGET, side, driver = "a", method = "/csi.v1.Controller/DeleteVolume", request, response = "", code = "OK", error = "", duration_us = 1500_u64);
        };
        tracing::subscriber::with_default(tracing_subscriber::registry().with(keeper.clone()), || {
            emit("caller", "DeleteVolumeRequest { volume_id: \"one\" }");
            emit("caller", "DeleteVolumeRequest { volume_id: \"one-more\" }");
            emit("driver", "DeleteVolumeRequest { volume_id: \"one\" }");
        });
        let calls: Vec<CallRecord> = read_lines(dir.path().join(CALLS)).collect();
        assert_eq!(calls.len(), 2);
        let about: Vec<_> =
            calls.iter().filter(|call| call.concerns(&["\"one\"".to_owned()].into())).collect();
        assert_eq!(about.len(), 1);
        assert!(text(about[0]).contains("Controller/DeleteVolume OK 1.5 ms"), "{}", text(about[0]));
    }
}
