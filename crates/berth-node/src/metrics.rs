//! The kubelet's metrics of its volume manager, counted when somebody asks.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::volumes::Volumes;

/// Counts volumes by plugin, as `volume_manager_total_volumes`.
pub(crate) struct VolumeCounts(pub(crate) Arc<Volumes>);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    plugin_name: String,
    state: &'static str,
}

impl fmt::Debug for VolumeCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VolumeCounts")
    }
}

impl Collector for VolumeCounts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (name, help) =
            ("volume_manager_total_volumes", "Volumes that pods want, and volumes that are mounted");
        let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (state, counts) in
            ["desired_state_of_world", "actual_state_of_world"].into_iter().zip(self.0.counts())
        {
            for (plugin_name, count) in counts {
                let labels = Labels { plugin_name, state };
                ConstGauge::new(i64::from(count)).encode(encoder.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
