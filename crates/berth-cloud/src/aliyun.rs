//! Alibaba Cloud's ECS API, version 2014-05-26, as far as disks need it.
//!
//! One path, `/`; the action is a parameter or a header, and parameters are in the query or in a form. Every request is signed
//! (`signature.rs`), and a request with a client token that was seen before gets the answer of then.

mod catalogue;
mod disks;
mod groups;
mod instances;
mod signature;
mod snapshots;

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use async_trait::async_trait;
use berth_core::hex;
use http::{Method, StatusCode};
use jiff::Timestamp;
use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::account::{Refusal, Rules, random_hex};
use crate::faults::Effects;
use crate::limits::Allowance;
use crate::records::{Disk, Instance, Snapshot, SnapshotGroup, TokenUse};
use crate::server::{Api, Call, InstanceOptions, Reply, Twin, decode_form};

const VERSION: &str = "2014-05-26";
/// How far a request's time may be from the server's.
const CLOCK_SKEW: Duration = Duration::from_secs(15 * 60);
const USUAL_TYPE: &str = "ecs.g7.large";
/// How long a token of the metadata service may be valid.
const LONGEST_TOKEN: u64 = 21_600;
/// The properties of a disk, snapshot or group that keep the client token it was created by, and what was asked for then.
const TOKEN: &str = "ClientToken";
const TOKEN_PARAMETERS: &str = "ClientTokenParameters";
/// Parameters that say nothing of what is asked for.
const COMMON: &[&str] = &[
    "AccessKeyId",
    "Action",
    "ClientToken",
    "Format",
    "SecurityToken",
    "Signature",
    "SignatureMethod",
    "SignatureNonce",
    "SignatureType",
    "SignatureVersion",
    "Timestamp",
    "Version",
];

/// The API of one region, for one access key.
pub(crate) struct Aliyun {
    access_key_id: String,
    secret: String,
    region: String,
    /// The nonces of the last minutes, and when each was used.
    nonces: Mutex<HashMap<String, Timestamp>>,
    /// The tokens of the metadata service, and until when each is valid.
    tokens: Mutex<HashMap<String, Timestamp>>,
}

/// An error as the API tells it.
#[derive(Debug)]
struct Failure {
    status: StatusCode,
    code: String,
    message: String,
}

/// What an action answers besides the id of the request.
type Answered = Result<Value, Failure>;

impl Failure {
    fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        Self { status, code: code.to_owned(), message: message.into() }
    }

    fn missing(name: &str) -> Self {
        let text = format!(
            "The input parameter \"{name}\" that is mandatory for processing this request is not supplied."
        );
        Self::new(StatusCode::BAD_REQUEST, &format!("Missing{name}"), text)
    }

    fn invalid(name: &str, value: &str) -> Self {
        let text = format!("The specified parameter {name} is not valid: {value}");
        Self::new(StatusCode::BAD_REQUEST, &format!("Invalid{name}.Malformed"), text)
    }

    fn forbidden(code: &str, message: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, code, message)
    }

    fn reply(self, call: &Call) -> Reply {
        let body = json!({
            "RequestId": call.request_id.to_uppercase(), "HostId": call.host(), "Code": self.code, "Message": self.message,
            "Recommend": format!("https://api.aliyun.com/troubleshoot?q={}&product=Ecs", self.code),
        });
        Reply::json(self.status, body)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        let status = "The current disk status does not support this operation.";
        match refusal {
            Refusal::NoDisk => Self::new(
                StatusCode::NOT_FOUND,
                "InvalidDiskId.NotFound",
                "The specified disk does not exist.",
            ),
            Refusal::NoSnapshot => Self::new(
                StatusCode::NOT_FOUND,
                "InvalidSnapshotId.NotFound",
                "The specified snapshot does not exist.",
            ),
            Refusal::NoInstance => Self::new(
                StatusCode::NOT_FOUND,
                "InvalidInstanceId.NotFound",
                "The specified instance does not exist.",
            ),
            Refusal::TooManyDisks => Self::forbidden(
                "QuotaExceed.PostPaidDisk",
                "Living postPaid disks quota exceeded in this region.",
            ),
            Refusal::NoCapacity => Self::forbidden(
                "QuotaExceed.DiskCapacity",
                "The used capacity of disk type has exceeded the quota in the zone.",
            ),
            Refusal::TooManySnapshots => {
                Self::forbidden("QuotaExceed.Snapshot", "The snapshot quota exceeds.")
            }
            Refusal::InstanceFull(_) => Self::forbidden(
                "InstanceDiskLimitExceeded",
                "The specified instance has reached its limit of disks.",
            ),
            Refusal::OtherZone => Self::forbidden(
                "ResourcesNotInSameZone",
                "The specified instance and disk are not in the same zone.",
            ),
            Refusal::Smaller(size) => Self::new(
                StatusCode::BAD_REQUEST,
                "InvalidDiskSize.TooSmall",
                format!("Specified new disk size is not larger than the current one, {size} GiB."),
            ),
            Refusal::Attached | Refusal::NotAttached | Refusal::DiskBusy | Refusal::NameTaken => {
                Self::forbidden("IncorrectDiskStatus", status)
            }
            Refusal::InstanceBusy => Self::forbidden(
                "IncorrectInstanceStatus",
                "The current status of the resource does not support this operation.",
            ),
            Refusal::Broken(why) => {
                tracing::error!("the twin's own storage failed: {why}");
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", why)
            }
        }
    }
}

impl From<berth_journal::Error> for Failure {
    fn from(error: berth_journal::Error) -> Self {
        Refusal::from(error).into()
    }
}

/// The parameters of one request.
struct Parameters(BTreeMap<String, String>);

impl Parameters {
    fn of(call: &Call) -> Vec<(String, String)> {
        let mut all = call.parameters();
        if call.header("content-type").starts_with("application/x-www-form-urlencoded") {
            all.extend(decode_form(&String::from_utf8_lossy(&call.body)));
        }
        all
    }

    /// A parameter that is given and not empty.
    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    fn required(&self, name: &str) -> Result<&str, Failure> {
        self.get(name).ok_or_else(|| Failure::missing(name))
    }

    fn number(&self, name: &str) -> Result<Option<u64>, Failure> {
        let value = self.get(name);
        value.map(|value| value.parse().map_err(|_| Failure::invalid(name, value))).transpose()
    }

    fn flag(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| value.eq_ignore_ascii_case("true"))
    }

    /// The values of `Name.1`, `Name.2` and so on.
    fn list(&self, name: &str) -> Vec<String> {
        (1..).map_while(|number| self.get(&format!("{name}.{number}"))).map(str::to_owned).collect()
    }

    /// A JSON array of strings.
    fn array(&self, name: &str) -> Result<Option<Vec<String>>, Failure> {
        let value = self.get(name);
        value.map(|value| serde_json::from_str(value).map_err(|_| Failure::invalid(name, value))).transpose()
    }

    /// The pairs of `Tag.1.Key` and `Tag.1.Value` and so on.
    fn tags(&self) -> BTreeMap<String, String> {
        let pairs = (1..).map_while(|number| {
            let key =
                self.get(&format!("Tag.{number}.Key")).or_else(|| self.get(&format!("Tag.{number}.key")));
            let value = self.get(&format!("Tag.{number}.Value")).unwrap_or_default();
            key.map(|key| (key.to_owned(), value.to_owned()))
        });
        pairs.collect()
    }

    /// What is asked for, whoever asks and whenever.
    fn digest(&self) -> String {
        let asked = self.0.iter().filter(|(name, _)| !COMMON.contains(&name.as_str()));
        let text: Vec<_> = asked.map(|(name, value)| format!("{name}={value}\n")).collect();
        hex(&Sha256::digest(text.concat()))
    }
}

/// One page of a list, by `MaxResults` and `NextToken` or by `PageNumber` and `PageSize`.
fn page(parameters: &Parameters, name: (&str, &str), items: Vec<Value>) -> Answered {
    let total = items.len();
    let mut answer = json!({"TotalCount": total});
    let (start, size) = if let Some(size) = parameters.number("MaxResults")? {
        let token = parameters.get("NextToken");
        let start = token.map(|token| {
            let start = token.strip_prefix("page-").and_then(|start| start.parse().ok());
            start.ok_or_else(|| Failure::invalid("NextToken", token))
        });
        // The service gives at least ten, whatever is asked for.
        (start.transpose()?.unwrap_or(0), usize::try_from(size).unwrap_or(500).clamp(10, 500))
    } else {
        let size = parameters.number("PageSize")?.unwrap_or(10).clamp(1, 100);
        let number = parameters.number("PageNumber")?.unwrap_or(1).max(1);
        answer["PageSize"] = size.into();
        answer["PageNumber"] = number.into();
        let start = (number - 1).saturating_mul(size);
        (usize::try_from(start).unwrap_or(usize::MAX), usize::try_from(size).unwrap_or(100))
    };
    if parameters.get("MaxResults").is_some() && start + size < total {
        answer["NextToken"] = format!("page-{}", start + size).into();
    }
    let shown: Vec<_> = items.into_iter().skip(start).take(size).collect();
    answer[name.0] = json!({name.1: shown});
    Ok(answer)
}

/// A time as the API writes it.
fn time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

impl Aliyun {
    pub(crate) const RULES: Rules = Rules {
        one_action_per_instance: false,
        unique_names: false,
        link_name: |disk| format!("virtio-{}", disks::serial(&disk.id)),
        other_link_name: |disk| format!("scsi-0Alibaba_{}", disks::serial(&disk.id)),
        disks_of_kind: instances::data_disks_of,
    };
    pub(crate) const NVME_RULES: Rules = Rules {
        link_name: |disk| format!("nvme-Alibaba_Cloud_Elastic_Block_Storage_{}", disks::serial(&disk.id)),
        ..Self::RULES
    };

    pub(crate) fn new(access_key_id: String, secret: String, region: String) -> Self {
        Self { access_key_id, secret, region, nonces: Mutex::default(), tokens: Mutex::default() }
    }

    fn action(call: &Call) -> String {
        let header = Some(call.header("x-acs-action")).filter(|action| !action.is_empty());
        let named = |(name, value): (String, String)| (name == "Action").then_some(value);
        header
            .map(str::to_owned)
            .or_else(|| Parameters::of(call).into_iter().find_map(named))
            .unwrap_or_default()
    }

    fn check(&self, call: &Call) -> Result<(), Failure> {
        let parameters = Parameters::of(call);
        let version = parameters.iter().find(|(name, _)| name == "Version").map(|(_, value)| value.as_str());
        if version.unwrap_or_else(|| call.header("x-acs-version")) != VERSION {
            return Err(Failure::new(
                StatusCode::BAD_REQUEST,
                "InvalidVersion",
                format!("The version must be {VERSION}."),
            ));
        }
        let signed = signature::read(call, &parameters)?;
        if signed.access_key_id != self.access_key_id {
            return Err(Failure::new(
                StatusCode::NOT_FOUND,
                "InvalidAccessKeyId.NotFound",
                "Specified access key is not found.",
            ));
        }
        signed.is_by(call, &self.secret)?;
        let now = Timestamp::now();
        let at: Timestamp = signed.at.parse().map_err(|_| {
            Failure::new(
                StatusCode::BAD_REQUEST,
                "InvalidTimeStamp.Format",
                "Specified time stamp or date value is not well formatted.",
            )
        })?;
        if at.duration_since(now).abs().unsigned_abs() > CLOCK_SKEW {
            return Err(Failure::new(
                StatusCode::BAD_REQUEST,
                "InvalidTimeStamp.Expired",
                "Specified time stamp or date value is expired.",
            ));
        }
        let mut nonces = self.nonces.lock();
        nonces.retain(|_, used| now.duration_since(*used).unsigned_abs() < CLOCK_SKEW);
        if signed.nonce.is_empty() || nonces.insert(signed.nonce, now).is_some() {
            return Err(Failure::new(
                StatusCode::BAD_REQUEST,
                "SignatureNonceUsed",
                "Specified signature nonce was used already.",
            ));
        }
        Ok(())
    }

    async fn dispatch(&self, twin: &Twin, call: &Call, effects: &Effects) -> Answered {
        let parameters = Parameters(Parameters::of(call).into_iter().collect());
        let action = Self::action(call);
        if let Some(region) = parameters.get("RegionId").filter(|region| **region != *self.region) {
            return Err(Failure::new(
                StatusCode::NOT_FOUND,
                "InvalidRegionId.NotFound",
                format!("The specified RegionId does not exist here: {region}"),
            ));
        }
        let request = Request { twin, region: &self.region, parameters, effects };
        match action.as_str() {
            "CreateDisk" | "CreateSnapshot" | "CreateSnapshotGroup" => request.once(&action).await,
            "DescribeDisks" => request.describe_disks(),
            "AttachDisk" => request.attach_disk(),
            "DetachDisk" => request.detach_disk(),
            "DeleteDisk" => request.delete_disk(),
            "ResizeDisk" => request.resize_disk().await,
            "ModifyDiskSpec" => request.modify_disk_spec(),
            "ModifyDiskAttribute" => request.modify_disk_attribute(),
            "DescribeTasks" => request.describe_tasks(),
            "DescribeSnapshots" => request.describe_snapshots(),
            "DeleteSnapshot" => request.delete_snapshot(),
            "DescribeSnapshotGroups" => request.describe_snapshot_groups(),
            "DeleteSnapshotGroup" => request.delete_snapshot_group(),
            "TagResources" | "AddTags" => request.tag(),
            "UntagResources" | "RemoveTags" => request.untag(),
            "ListTagResources" => request.list_tag_resources(),
            "DescribeTags" => request.describe_tags(),
            "DescribeInstances" => request.describe_instances(),
            "DescribeInstanceTypes" => Ok(request.describe_instance_types()),
            "DescribeInstanceHistoryEvents" => Ok(json!({
                "TotalCount": 0, "PageNumber": 1, "PageSize": 10,
                "InstanceSystemEventSet": {"InstanceSystemEventType": []},
            })),
            "DescribeAvailableResource" => request.describe_available_resource(),
            "DescribeAccountAttributes" => Ok(request.describe_account_attributes()),
            "DescribeRegions" => Ok(json!({"Regions": {"Region": [
                {"RegionId": self.region, "LocalName": self.region, "RegionEndpoint": call.host()},
            ]}})),
            "DescribeZones" => Ok(request.describe_zones()),
            "StartInstance" | "StopInstance" | "DeleteInstance" => request.switch_instance(&action),
            "" => Err(Failure::missing("Action")),
            _ => Err(Failure::new(
                StatusCode::NOT_FOUND,
                "InvalidAction.NotFound",
                format!("Specified api is not found, please check your url and method: {action}"),
            )),
        }
    }
}

/// One request that was signed rightly.
struct Request<'a> {
    twin: &'a Twin,
    region: &'a str,
    parameters: Parameters,
    effects: &'a Effects,
}

impl Request<'_> {
    /// Creates something, or gives the answer of the request that had the same client token.
    async fn once(&self, action: &str) -> Answered {
        let key = match action {
            "CreateDisk" => "DiskId",
            "CreateSnapshot" => "SnapshotId",
            _ => "SnapshotGroupId",
        };
        let token = self.parameters.get("ClientToken").map(|token| format!("{action}:{token}"));
        let digest = self.parameters.digest();
        // One at a time: of two requests with one token, the second is to find the first.
        let _turn = self.twin.account.creating.lock().await;
        if let Some(used) = token.as_deref().and_then(|token| self.used(token)) {
            if used.parameters == digest {
                return Ok(json!({key: used.answer}));
            }
            return Err(Failure::new(
                StatusCode::BAD_REQUEST,
                "IdempotentParameterMismatch",
                "The request uses the same client token as a previous, but non-identical request.",
            ));
        }
        let mut properties = BTreeMap::new();
        if let Some(token) = &token {
            properties.insert(TOKEN.to_owned(), token.clone());
            properties.insert(TOKEN_PARAMETERS.to_owned(), digest.clone());
        }
        let id = match action {
            "CreateDisk" => self.create_disk(properties)?,
            "CreateSnapshot" => self.create_snapshot(properties)?,
            _ => self.create_snapshot_group(properties)?,
        };
        if let Some(token) = token {
            let used = TokenUse { parameters: digest, answer: id.clone() };
            self.twin.account.records().put_token(&token, used)?;
        }
        Ok(json!({key: id}))
    }

    /// What was answered to a request with this token. A twin that was killed between the records of a disk and of its token
    /// finds the token with the disk.
    fn used(&self, token: &str) -> Option<TokenUse> {
        let records = self.twin.account.records();
        let by_token = |properties: &BTreeMap<String, String>| {
            let parameters = properties.get(TOKEN_PARAMETERS)?;
            properties.get(TOKEN).filter(|own| *own == token).map(|_| parameters.clone())
        };
        let of_disk =
            |disk: &Disk| Some(TokenUse { parameters: by_token(&disk.properties)?, answer: disk.id.clone() });
        let of_snapshot = |snapshot: &Snapshot| {
            Some(TokenUse { parameters: by_token(&snapshot.properties)?, answer: snapshot.id.clone() })
        };
        let of_group = |group: &SnapshotGroup| {
            Some(TokenUse { parameters: by_token(&group.properties)?, answer: group.id.clone() })
        };
        let kept = records.tokens.get(token).cloned();
        kept.or_else(|| records.disks.values().find_map(of_disk))
            .or_else(|| records.snapshots.values().find_map(of_snapshot))
            .or_else(|| records.groups.values().find_map(of_group))
    }
}

#[async_trait]
impl Api for Aliyun {
    fn kind(&self, call: &Call) -> String {
        Some(Self::action(call)).filter(|action| !action.is_empty()).unwrap_or_else(|| "unknown".to_owned())
    }

    fn authenticate(&self, call: &Call) -> Result<(), Reply> {
        self.check(call).map_err(|failure| failure.reply(call))
    }

    /// Every action has a limit of its own.
    fn limited_by(&self, kind: &str) -> String {
        kind.to_owned()
    }

    async fn answer(&self, twin: &Twin, call: &Call, effects: &Effects) -> Reply {
        match self.dispatch(twin, call, effects).await {
            Ok(mut answer) => {
                answer["RequestId"] = call.request_id.to_uppercase().into();
                Reply::json(StatusCode::OK, answer)
            }
            Err(failure) => failure.reply(call),
        }
    }

    fn failure(&self, call: &Call, status: StatusCode) -> Reply {
        let code =
            if status == StatusCode::SERVICE_UNAVAILABLE { "ServiceUnavailable" } else { "InternalError" };
        Failure::new(status, code, "The request processing has failed due to some unknown error.").reply(call)
    }

    fn throttled(&self, call: &Call, _: Duration) -> Reply {
        let text = "Request was denied due to user flow control.";
        Failure::new(StatusCode::TOO_MANY_REQUESTS, "Throttling.User", text).reply(call)
    }

    fn decorate(&self, call: &Call, reply: Reply, _: Option<&Allowance>) -> Reply {
        reply.with_header("x-acs-request-id", call.request_id.to_uppercase())
    }

    fn metadata(&self, instance: &Instance, path: &str, call: &Call) -> Reply {
        let now = Timestamp::now();
        if path == "latest/api/token" {
            let seconds = call.header("x-aliyun-ecs-metadata-token-ttl-seconds").parse::<u64>().unwrap_or(0);
            if call.method != Method::PUT || !(1..=LONGEST_TOKEN).contains(&seconds) {
                return Reply::text(StatusCode::BAD_REQUEST, "Bad Request");
            }
            let token = random_hex(16);
            let mut tokens = self.tokens.lock();
            tokens.retain(|_, until| *until > now);
            tokens.insert(token.clone(), now + Duration::from_secs(seconds));
            return Reply::text(StatusCode::OK, token);
        }
        let token = call.header("x-aliyun-ecs-metadata-token");
        if call.method != Method::GET || self.tokens.lock().get(token).is_none_or(|until| *until <= now) {
            return Reply::text(StatusCode::UNAUTHORIZED, "Unauthorized");
        }
        let text = match path {
            "latest/dynamic/instance-identity/document" => {
                return Reply::json(StatusCode::OK, self.identity(instance));
            }
            "latest/meta-data/instance-id" => &instance.id,
            "latest/meta-data/region-id" => &self.region,
            "latest/meta-data/zone-id" => &instance.zone,
            "latest/meta-data/hostname" => &instance.name,
            "latest/meta-data/instance/instance-type" => &instance.kind,
            _ => return Reply::text(StatusCode::NOT_FOUND, "Not Found"),
        };
        Reply::text(StatusCode::OK, text)
    }

    fn instance(&self, options: &InstanceOptions) -> Result<Instance, String> {
        let zones = catalogue::zones(&self.region);
        let zone = options.zone.clone().unwrap_or_else(|| zones[0].clone());
        if !zones.contains(&zone) {
            return Err(format!("{} has the zones {}, not {zone}", self.region, zones.join(", ")));
        }
        let is_id = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if !options.id.starts_with("i-") || !options.id.chars().all(is_id) {
            return Err(format!("the id of an instance begins with i-, unlike `{}`", options.id));
        }
        let kind = options.kind.clone().unwrap_or_else(|| USUAL_TYPE.to_owned());
        if instances::data_disks_of(&kind).is_none() {
            let known: Vec<_> = catalogue::INSTANCE_TYPES.iter().map(|(name, ..)| *name).collect();
            return Err(format!("there is no type {kind}; there are {}", known.join(", ")));
        }
        Ok(Instance {
            id: options.id.clone(),
            name: options.id.clone(),
            zone,
            kind,
            devices: options.devices,
            powered_on: true,
            created: Timestamp::now(),
        })
    }
}
