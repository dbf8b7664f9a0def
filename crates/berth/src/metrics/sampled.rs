//! What takes drivers' answers or a look at the whole cluster: how full volumes are, and what the doctor finds.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use berth_kube::Cluster;
use berth_node::VolumeUsage;
use berth_ui::{ClusterState, Finding, Severity, Trouble, diagnose};
use futures_util::future::join_all;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet};
use tokio::time::Instant;

use super::Usages;
use super::objects::gauge;

/// How old an answer may be: kubelets ask once a minute.
pub(super) const FRESH: Duration = Duration::from_secs(30);

/// What was last found, and when it was last looked for.
#[derive(Clone)]
pub(super) struct Sampled {
    cluster: Cluster,
    usage: Usages,
    known: Arc<Mutex<Sample>>,
}

#[derive(Default)]
struct Sample {
    begun: Option<Instant>,
    usage: Vec<VolumeUsage>,
    findings: BTreeMap<(Severity, Trouble), u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClaimLabels {
    namespace: String,
    persistentvolumeclaim: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FindingLabels {
    severity: &'static str,
    trouble: &'static str,
}

impl fmt::Debug for Sampled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sampled")
    }
}

impl Sampled {
    pub(super) fn new(cluster: &Cluster, usage: Usages) -> Self {
        let sampled = Self { cluster: cluster.clone(), usage, known: Arc::default() };
        sampled.renew();
        sampled
    }

    /// Looks again in the background if what is known is old; whoever asks gets what is known now.
    fn renew(&self) {
        {
            let mut known = self.known.lock();
            if known.begun.is_some_and(|begun| begun.elapsed() < FRESH) {
                return;
            }
            known.begun = Some(Instant::now());
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let sampled = self.clone();
        runtime.spawn(async move {
            let readers: Vec<_> = sampled.usage.lock().values().cloned().collect();
            let usage = join_all(readers.iter().map(berth_node::UsageReader::read)).await;
            sampled.known.lock().usage = usage.concat();
            let state = ClusterState::cached(&sampled.cluster).await;
            let findings = tokio::task::spawn_blocking(move || diagnose(&state)).await;
            sampled.known.lock().findings = counted(&findings.unwrap_or_default());
        });
    }
}

fn counted(findings: &[Finding]) -> BTreeMap<(Severity, Trouble), u32> {
    let mut counts = BTreeMap::new();
    for finding in findings {
        *counts.entry((finding.severity, finding.trouble)).or_default() += 1;
    }
    counts
}

/// Reads one figure of a volume, if it was reported.
type Figure = fn(&VolumeUsage) -> Option<u64>;

impl Collector for Sampled {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        self.renew();
        let known = self.known.lock();
        let labels = |usage: &VolumeUsage| ClaimLabels {
            namespace: usage.claim.namespace.clone(),
            persistentvolumeclaim: usage.claim.name.clone(),
        };
        let gauges: [(&str, &str, Figure); 6] = [
            ("kubelet_volume_stats_capacity_bytes", "Bytes of a volume", |usage| Some(usage.bytes.total)),
            ("kubelet_volume_stats_available_bytes", "Bytes of a volume that are free", |usage| {
                Some(usage.bytes.available)
            }),
            ("kubelet_volume_stats_used_bytes", "Bytes of a volume in use", |usage| Some(usage.bytes.used)),
            ("kubelet_volume_stats_inodes", "Inodes of a volume", |usage| Some(usage.inodes?.total)),
            ("kubelet_volume_stats_inodes_free", "Inodes of a volume that are free", |usage| {
                Some(usage.inodes?.available)
            }),
            ("kubelet_volume_stats_inodes_used", "Inodes of a volume in use", |usage| {
                Some(usage.inodes?.used)
            }),
        ];
        for (name, help, of) in gauges {
            #[expect(
                clippy::cast_precision_loss,
                reason = "a volume of so many bytes is not exact to the byte"
            )]
            let values = known.usage.iter().filter_map(|usage| Some((labels(usage), of(usage)? as f64)));
            gauge(&mut encoder, name, help, values)?;
        }
        // All of them, so that a rule sees zero and not nothing.
        let findings = Trouble::ALL.iter().flat_map(|trouble| {
            [Severity::Note, Severity::Warning, Severity::Error].map(|severity| {
                let count = known.findings.get(&(severity, *trouble)).copied().unwrap_or(0);
                (FindingLabels { severity: severity.word(), trouble: trouble.code() }, f64::from(count))
            })
        });
        gauge(
            &mut encoder,
            "berth_findings",
            "What `berth doctor` finds, by severity and kind of trouble",
            findings,
        )
    }
}
