//! What a driver says of its volumes' health: by the calls of CSI 1.13, or by the conditions that drivers of older
//! versions put into the answers of ListVolumes and ControllerGetVolume.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use berth_csi::{Call, v1};
use tonic::Status;

use super::{ControllerCapability, Driver, Identity};

/// What a driver knows of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// The driver reports nothing wrong.
    Well,
    /// The driver reports this as wrong.
    Ill(String),
}

/// The calls by which a driver reports the health of volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthCalls {
    /// ControllerListVolumeHealth, which may leave out what is well.
    List,
    /// ControllerGetVolumeHealth, one call per volume.
    Get,
    /// ListVolumes, before CSI 1.13.
    ListConditions,
    /// ControllerGetVolume, before CSI 1.13.
    GetCondition,
}

impl HealthCalls {
    /// How a driver reports its volumes' health, if it does: one call for all of them if possible.
    pub fn of(identity: &Identity) -> Option<Self> {
        let can = |capability| identity.can(capability);
        let condition = |capability| identity.tells_condition && identity.can(capability);
        [
            (can(ControllerCapability::ListVolumeHealth), HealthCalls::List),
            (condition(ControllerCapability::ListVolumes), HealthCalls::ListConditions),
            (can(ControllerCapability::GetVolumeHealth), HealthCalls::Get),
            (condition(ControllerCapability::GetVolume), HealthCalls::GetCondition),
        ]
        .into_iter()
        .find_map(|(there, calls)| there.then_some(calls))
    }
}

impl Driver {
    /// The health of every volume that the driver lists, each page within the time of one call.
    pub async fn list_health(
        &self,
        timeout: Duration,
        conditions: bool,
    ) -> Result<HashMap<String, Health>, Status> {
        let mut all = HashMap::new();
        let (mut token, mut tokens) = (String::new(), HashSet::new());
        loop {
            let starting_token = token;
            let next = if conditions {
                let page = self.call(timeout, ListConditionedVolumes { starting_token }).await?;
                all.extend(page.entries.into_iter().filter_map(|entry| {
                    let health = entry.health();
                    Some((entry.volume?.volume_id, health))
                }));
                page.next_token
            } else {
                let request = v1::ControllerListVolumeHealthRequest { starting_token, ..Default::default() };
                let page = self.call(timeout, request).await?;
                all.extend(page.entries.iter().map(|volume| (volume.volume_id.clone(), health_of(volume))));
                page.next_token
            };
            if next.is_empty() {
                return Ok(all);
            }
            if !tokens.insert(next.clone()) {
                return Err(Status::internal(
                    "the CSI driver's list of volumes never ends: it gives a token again",
                ));
            }
            token = next;
        }
    }

    /// The health of one volume.
    pub async fn get_health(
        &self,
        timeout: Duration,
        volume_id: &str,
        condition: bool,
    ) -> Result<Health, Status> {
        let volume_id = volume_id.to_owned();
        if condition {
            return Ok(self.call(timeout, GetConditionedVolume { volume_id }).await?.health());
        }
        let request = v1::ControllerGetVolumeHealthRequest { volume_id, ..Default::default() };
        let answer = self.call(timeout, request).await?;
        Ok(answer.volume_health.as_ref().map_or(Health::Well, health_of))
    }
}

/// One sentence of all that is wrong, the same in whatever order the driver reports it.
fn health_of(volume: &v1::VolumeHealth) -> Health {
    let mut sentences: Vec<String> = volume
        .health_statuses
        .iter()
        .map(|entry| {
            let severity = match entry.status() {
                v1::VolumeHealthErrorType::UnknownVolumeHealthType => "",
                known => known.as_str_name(),
            };
            let name = [severity, entry.reason.as_str()].map(str::trim).join(" ");
            match (name.trim(), entry.message.trim()) {
                (name, "") => name.to_owned(),
                ("", message) => message.to_owned(),
                (name, message) => format!("{name}: {message}"),
            }
        })
        .collect();
    if sentences.is_empty() {
        return Health::Well;
    }
    sentences.sort();
    Health::Ill(sentences.join("; "))
}

/// ListVolumes, its answer read as it was before CSI 1.13.
#[derive(Clone, PartialEq, prost::Message)]
struct ListConditionedVolumes {
    #[prost(string, tag = "2")]
    starting_token: String,
}

impl Call for ListConditionedVolumes {
    const METHOD: &'static str = v1::ListVolumesRequest::METHOD;
    type Answer = ConditionedPage;
}

/// ControllerGetVolume, its answer read as it was before CSI 1.13.
#[derive(Clone, PartialEq, prost::Message)]
struct GetConditionedVolume {
    #[prost(string, tag = "1")]
    volume_id: String,
}

impl Call for GetConditionedVolume {
    const METHOD: &'static str = v1::ControllerGetVolumeRequest::METHOD;
    type Answer = Conditioned;
}

/// A page of ListVolumes before CSI 1.13.
#[derive(Clone, PartialEq, prost::Message)]
struct ConditionedPage {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<Conditioned>,
    #[prost(string, tag = "2")]
    next_token: String,
}

/// An entry of that page, and the answer of ControllerGetVolume.
#[derive(Clone, PartialEq, prost::Message)]
struct Conditioned {
    #[prost(message, optional, tag = "1")]
    volume: Option<v1::Volume>,
    #[prost(message, optional, tag = "2")]
    status: Option<ConditionedStatus>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ConditionedStatus {
    #[prost(message, optional, tag = "2")]
    volume_condition: Option<VolumeCondition>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct VolumeCondition {
    #[prost(bool, tag = "1")]
    abnormal: bool,
    #[prost(string, tag = "2")]
    message: String,
}

impl Conditioned {
    fn health(&self) -> Health {
        let condition = self.status.as_ref().and_then(|status| status.volume_condition.as_ref());
        match condition.filter(|condition| condition.abnormal) {
            Some(condition) => Health::Ill(condition.message.clone()),
            None => Health::Well,
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    fn entry(
        status: v1::VolumeHealthErrorType,
        reason: &str,
        message: &str,
    ) -> v1::volume_health::VolumeHealthEntry {
        let (reason, message) = (reason.to_owned(), message.to_owned());
        v1::volume_health::VolumeHealthEntry { status: status.into(), reason, message }
    }

    #[test]
    fn all_that_is_wrong_is_one_sentence_in_whatever_order_it_comes() {
        let degraded = entry(v1::VolumeHealthErrorType::Degraded, "Rebuilding", "a disk is replaced");
        let lost = entry(v1::VolumeHealthErrorType::DataLoss, "BadBlocks", "");
        let of =
            |health_statuses| health_of(&v1::VolumeHealth { volume_id: "v".to_owned(), health_statuses });
        let sentence = "DATA_LOSS BadBlocks; DEGRADED Rebuilding: a disk is replaced".to_owned();
        assert_eq!(of(vec![degraded.clone(), lost.clone()]), Health::Ill(sentence.clone()));
        assert_eq!(of(vec![lost, degraded]), Health::Ill(sentence));
        assert_eq!(of(Vec::new()), Health::Well);
        // A later version's word is passed on without one's own.
        let mut later = entry(v1::VolumeHealthErrorType::Degraded, "MultipathLoss", "one way is left");
        later.status = 99;
        assert_eq!(of(vec![later]), Health::Ill("MultipathLoss: one way is left".to_owned()));
    }

    #[test]
    fn the_condition_of_an_older_driver_is_read_by_its_numbers() {
        // volume { volume_id: "v" } status { published_node_ids: "n" volume_condition { abnormal: true message: "m" } }
        let bytes = [
            0x0a, 0x03, 0x12, 0x01, b'v', 0x12, 0x0a, 0x0a, 0x01, b'n', 0x12, 0x05, 0x08, 0x01, 0x12, 0x01,
            b'm',
        ];
        let volume = Conditioned::decode(&bytes[..]).unwrap();
        assert_eq!(volume.health(), Health::Ill("m".to_owned()));
        assert_eq!(volume.volume.unwrap().volume_id, "v");
        assert_eq!(Conditioned::default().health(), Health::Well);
    }

    #[test]
    fn one_call_for_all_is_preferred_and_conditions_need_their_capability() {
        use ControllerCapability::{GetVolume, GetVolumeHealth, ListVolumeHealth, ListVolumes};
        for (controller, tells_condition, expected) in [
            (&[][..], true, None),
            (&[ListVolumes, GetVolume], false, None),
            (&[ListVolumes, GetVolume], true, Some(HealthCalls::ListConditions)),
            (&[GetVolume], true, Some(HealthCalls::GetCondition)),
            (&[GetVolumeHealth], false, Some(HealthCalls::Get)),
            (&[GetVolumeHealth, ListVolumes], true, Some(HealthCalls::ListConditions)),
            (&[GetVolumeHealth, ListVolumeHealth, ListVolumes], true, Some(HealthCalls::List)),
        ] {
            let controller: HashSet<_> = controller.iter().copied().collect();
            let identity = Identity { controller, tells_condition, ..Identity::default() };
            assert_eq!(HealthCalls::of(&identity), expected, "{identity:?}");
        }
    }
}
