//! Instances, their types, the zones they are in, and what the account may have.

use http::StatusCode;
use serde_json::{Value, json};

use super::catalogue::{self, CATEGORIES, INSTANCE_TYPES};
use super::{Aliyun, Answered, Failure, Request, page, time};
use crate::account::Account;
use crate::records::Instance;

/// How many data disks an instance of this type takes: its system disk counts as one of its disks.
pub(super) fn data_disks_of(kind: &str) -> Option<u64> {
    let known = INSTANCE_TYPES.iter().find(|(name, ..)| *name == kind);
    known.map(|(_, _, _, disks)| disks - 1)
}

impl Aliyun {
    pub(super) fn identity(&self, instance: &Instance) -> Value {
        json!({
            "region-id": self.region, "zone-id": instance.zone, "instance-id": instance.id, "instance-type": instance.kind,
            "owner-account-id": "1234567890123456", "image-id": "twin", "private-ipv4": "127.0.0.1", "mac": "",
            "serial-number": instance.id, "network-type": "vpc",
        })
    }
}

impl Request<'_> {
    pub(super) fn describe_instances(&self) -> Answered {
        let ids = self.parameters.array("InstanceIds")?;
        let records = self.twin.account.records();
        let found = records.instances.values().filter(|one| {
            ids.as_ref().is_none_or(|ids| ids.contains(&one.id))
                && self.parameters.get("ZoneId").is_none_or(|zone| one.zone == zone)
        });
        let found = found
            .map(|one| {
                json!({
                    "InstanceId": one.id, "InstanceName": one.name, "HostName": one.name, "RegionId": self.region,
                    "ZoneId": one.zone, "InstanceType": one.kind, "CreationTime": time(one.created),
                    "Status": if one.powered_on { "Running" } else { "Stopped" }, "InstanceChargeType": "PostPaid",
                    "InstanceNetworkType": "vpc", "OSType": "linux", "Tags": {"Tag": []},
                })
            })
            .collect();
        page(&self.parameters, ("Instances", "Instance"), found)
    }

    pub(super) fn describe_instance_types(&self) -> Value {
        let wanted = self.parameters.list("InstanceTypes");
        let types = INSTANCE_TYPES
            .iter()
            .filter(|(name, ..)| wanted.is_empty() || wanted.iter().any(|one| one == name));
        let types: Vec<_> = types.map(catalogue::instance_type).collect();
        json!({"NextToken": "", "InstanceTypes": {"InstanceType": types}})
    }

    pub(super) fn describe_available_resource(&self) -> Answered {
        let whole_region =
            self.parameters.get("Scope").is_some_and(|scope| scope.eq_ignore_ascii_case("region"));
        let zones = catalogue::zones(self.region);
        let shown: Vec<_> = match self.parameters.get("ZoneId") {
            _ if whole_region => vec![String::new()],
            Some(zone) if zones.iter().any(|known| known == zone) => vec![zone.to_owned()],
            Some(_) => {
                return Err(Failure::new(
                    StatusCode::NOT_FOUND,
                    "InvalidZoneId.NotFound",
                    "The specified zone does not exist.",
                ));
            }
            None => zones,
        };
        let shown: Vec<_> = shown.iter().map(|zone| catalogue::available(self.region, zone)).collect();
        Ok(json!({"AvailableZones": {"AvailableZone": shown}}))
    }

    pub(super) fn describe_zones(&self) -> Value {
        let categories: Vec<_> = CATEGORIES.iter().map(|category| category.name).collect();
        let zones: Vec<_> = catalogue::zones(self.region)
            .into_iter()
            .map(|zone| {
                json!({
                    "ZoneId": zone, "LocalName": zone, "ZoneType": "AvailabilityZone",
                    "AvailableDiskCategories": {"DiskCategories": categories},
                    "AvailableResourceCreation": {"ResourceTypes": ["Instance", "Disk", "VSwitch"]},
                })
            })
            .collect();
        json!({"Zones": {"Zone": zones}})
    }

    /// The quota of disks' capacity: one for the account here, told for each zone and category.
    pub(super) fn describe_account_attributes(&self) -> Value {
        let account = &self.twin.account;
        let (most, used) = (account.quotas.capacity_gib, Account::used_gib(&account.records()));
        let values = |value: u64| -> Vec<Value> {
            let zones = catalogue::zones(self.region).into_iter();
            let of_zone = |zone: String| {
                CATEGORIES.iter().map(move |category| {
                    json!({"ZoneId": zone, "DiskCategory": category.name, "Value": value.to_string()})
                })
            };
            zones.flat_map(of_zone).collect()
        };
        let items = [("max-postpaid-yundisk-capacity", most), ("used-postpaid-yundisk-capacity", used)];
        let items: Vec<_> = items
            .iter()
            .map(|(name, value)| json!({"AttributeName": name, "AttributeValues": {"ValueItem": values(*value)}}))
            .collect();
        json!({"AccountAttributeItems": {"AccountAttributeItem": items}})
    }

    pub(super) fn switch_instance(&self, action: &str) -> Answered {
        let id = self.parameters.required("InstanceId")?;
        match action {
            "DeleteInstance" => self.twin.account.remove_instance(id)?,
            other => {
                self.twin.account.set_power(id, other == "StartInstance")?;
            }
        }
        Ok(json!({}))
    }
}
