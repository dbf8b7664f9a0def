//! Reasons of the events that controllers and sidecars record. Alerts and people search for them, so they are upstream's where upstream
//! has one.

/// Reason of the event that says: it is not known how many pods a PodDisruptionBudget is about.
pub const CALCULATE_EXPECTED_POD_COUNT_FAILED: &str = "CalculateExpectedPodCountFailed";
/// Reason of the event that says: the volume of a bound claim is gone.
pub const CLAIM_LOST: &str = "ClaimLost";
/// Reason of the event that says: two claims are bound to one volume.
pub const CLAIM_MISBOUND: &str = "ClaimMisbound";
/// Reason of the event that says: a claim of a StatefulSet is smaller than its template.
pub const CLAIM_SMALLER_THAN_TEMPLATE: &str = "ClaimSmallerThanTemplate";
/// Reason of the event that says: a VolumeSnapshotContent names no source, or two.
pub const CONTENT_VALIDATION_ERROR: &str = "ContentValidationError";
/// Reason of the event that says: a Job has finished.
pub const COMPLETED: &str = "Completed";
/// Reason of the event that says: the content of a group snapshot could not be saved.
pub const CREATE_GROUP_SNAPSHOT_CONTENT_FAILED: &str = "CreateGroupSnapshotContentFailed";
/// Reason of the event that says: the content of a snapshot could not be saved.
pub const CREATE_SNAPSHOT_CONTENT_FAILED: &str = "CreateSnapshotContentFailed";
/// Reason of the event that says: a group snapshot waits for the driver.
pub const CREATING_GROUP_SNAPSHOT: &str = "CreatingGroupSnapshot";
/// Reason of the event that says: a snapshot waits for the driver.
pub const CREATING_SNAPSHOT: &str = "CreatingSnapshot";
/// Reason of the event that says: a claim waits for the resizer of its driver.
pub const EXTERNAL_EXPANDING: &str = "ExternalExpanding";
/// Reason of the event that says: a claim waits for the provisioner of its driver.
pub const EXTERNAL_PROVISIONING: &str = "ExternalProvisioning";
/// Reason of the event that says: a volume could not be attached to the pod's node.
pub const FAILED_ATTACH_VOLUME: &str = "FailedAttachVolume";
/// Reason of the event that says: a claim cannot be bound yet.
pub const FAILED_BINDING: &str = "FailedBinding";
/// Reason of the event that says: a workload could not create a pod or a claim.
pub const FAILED_CREATE: &str = "FailedCreate";
/// Reason of the event that says: a pod of a DaemonSet failed and is replaced.
pub const FAILED_DAEMON_POD: &str = "FailedDaemonPod";
/// Reason of the event that says: a workload could not delete a pod.
pub const FAILED_DELETE: &str = "FailedDelete";
/// Reason of the event that says: a CronJob could not find a Job that it wants to replace.
pub const FAILED_GET: &str = "FailedGet";
/// Reason of the event that says: no node fits a pod.
pub const FAILED_SCHEDULING: &str = "FailedScheduling";
/// Reason of the event that says: a StatefulSet could not restore a pod's labels.
pub const FAILED_UPDATE: &str = "FailedUpdate";
/// Reason of the event that says: the node has to finish an expansion.
pub const FILE_SYSTEM_RESIZE_REQUIRED: &str = "FileSystemResizeRequired";
/// Reason of the event that says: the class of a group snapshot does not exist or does not fit.
pub const GET_GROUP_SNAPSHOT_CLASS_FAILED: &str = "GetGroupSnapshotClassFailed";
/// Reason of the event that says: the class of a snapshot does not exist or does not fit.
pub const GET_SNAPSHOT_CLASS_FAILED: &str = "GetSnapshotClassFailed";
/// Reason of the event that says: a VolumeGroupSnapshotContent names no source, or two.
pub const GROUP_CONTENT_VALIDATION_ERROR: &str = "GroupContentValidationError";
/// Reason of the event that says: a group snapshot could not be bound to its content.
pub const GROUP_SNAPSHOT_BIND_FAILED: &str = "GroupSnapshotBindFailed";
/// Reason of the event that says: the state of a group snapshot could not be learned from the driver.
pub const GROUP_SNAPSHOT_CONTENT_CHECK_AND_UPDATE_FAILED: &str = "GroupSnapshotContentCheckandUpdateFailed";
/// Reason of the event that says: the content of a group snapshot cannot be made.
pub const GROUP_SNAPSHOT_CONTENT_CREATION_FAILED: &str = "GroupSnapshotContentCreationFailed";
/// Reason of the event that says: the content of a ready group snapshot is gone.
pub const GROUP_SNAPSHOT_CONTENT_MISSING: &str = "GroupSnapshotContentMissing";
/// Reason of the event that says: the content of a group snapshot could not be deleted.
pub const GROUP_SNAPSHOT_CONTENT_OBJECT_DELETE_ERROR: &str = "GroupSnapshotContentObjectDeleteError";
/// Reason of the event that says: the driver has taken a group snapshot.
pub const GROUP_SNAPSHOT_CREATED: &str = "GroupSnapshotCreated";
/// Reason of the event that says: the driver could not take a group snapshot.
pub const GROUP_SNAPSHOT_CREATION_FAILED: &str = "GroupSnapshotCreationFailed";
/// Reason of the event that says: the driver could not delete a group snapshot.
pub const GROUP_SNAPSHOT_DELETE_ERROR: &str = "GroupSnapshotDeleteError";
/// Reason of the event that says: the content of a group snapshot belongs to another.
pub const GROUP_SNAPSHOT_MISBOUND: &str = "GroupSnapshotMisbound";
/// Reason of the event that says: a group snapshot can be restored from.
pub const GROUP_SNAPSHOT_READY: &str = "GroupSnapshotReady";
/// Reason of the event that says: a group snapshot names no source, or two.
pub const GROUP_SNAPSHOT_VALIDATION_ERROR: &str = "GroupSnapshotValidationError";
/// Reason of the event that says: the schedule of a CronJob makes no sense.
pub const INVALID_SCHEDULE: &str = "InvalidSchedule";
/// Reason of the event that says: a CronJob starts no Job because the last one still runs.
pub const JOB_ALREADY_ACTIVE: &str = "JobAlreadyActive";
/// Reason of the event that says: a CronJob did not start a Job in time.
pub const MISS_SCHEDULE: &str = "MissSchedule";
/// Reason of the event that says: a Job that a CronJob started is gone.
pub const MISSING_JOB: &str = "MissingJob";
/// Reason of the event that says: the node of pods that use a claim has failed.
pub const NODE_FAILED: &str = "NodeFailed";
/// Reason of the event that says: the node of pods that use a claim works again.
pub const NODE_RECOVERED: &str = "NodeRecovered";
/// A node is not ready any more; also on its pods.
pub const NODE_NOT_READY: &str = "NodeNotReady";
/// Reason of the event that says: a PodDisruptionBudget is about no pod.
pub const NO_PODS: &str = "NoPods";
/// Reason of the event that says: a pod leaves its node to make room for a more important one.
pub const PREEMPTED: &str = "Preempted";
/// Reason of the event that says: the driver is asked for a claim's volume.
pub const PROVISIONING: &str = "Provisioning";
/// Reason of the event that says: a claim's volume could not be created.
pub const PROVISIONING_FAILED: &str = "ProvisioningFailed";
/// Reason of the event that says: a claim's volume is created.
pub const PROVISIONING_SUCCEEDED: &str = "ProvisioningSucceeded";
/// Reason of the event that says: something happened to the pod that empties a volume.
pub const RECYCLER_POD: &str = "RecyclerPod";
/// Reason of the event that says: a Deployment could not create a ReplicaSet.
pub const REPLICA_SET_CREATE_ERROR: &str = "ReplicaSetCreateError";
/// Reason of the event that says: the driver is asked to expand a volume.
pub const RESIZING: &str = "Resizing";
/// Reason of the event that says: a Job goes on.
pub const RESUMED: &str = "Resumed";
/// Reason of the event that says: a Job that a CronJob started has finished.
pub const SAW_COMPLETED_JOB: &str = "SawCompletedJob";
/// Reason of the event that says: a Deployment changes the size of a ReplicaSet.
pub const SCALING_REPLICA_SET: &str = "ScalingReplicaSet";
/// Reason of the event that says: a pod is assigned to a node.
pub const SCHEDULED: &str = "Scheduled";
/// Reason of the event that says: the selector of a Deployment is empty.
pub const SELECTING_ALL: &str = "SelectingAll";
/// Reason of the event that says: no default class fits a group snapshot.
pub const SET_DEFAULT_GROUP_SNAPSHOT_CLASS_FAILED: &str = "SetDefaultGroupSnapshotClassFailed";
/// Reason of the event that says: no default class fits a snapshot.
pub const SET_DEFAULT_SNAPSHOT_CLASS_FAILED: &str = "SetDefaultSnapshotClassFailed";
/// Reason of the event that says: a snapshot could not be bound to its content.
pub const SNAPSHOT_BIND_FAILED: &str = "SnapshotBindFailed";
/// Reason of the event that says: the state of a snapshot could not be learned from the driver.
pub const SNAPSHOT_CONTENT_CHECK_AND_UPDATE_FAILED: &str = "SnapshotContentCheckandUpdateFailed";
/// Reason of the event that says: the content of a snapshot cannot be made.
pub const SNAPSHOT_CONTENT_CREATION_FAILED: &str = "SnapshotContentCreationFailed";
/// Reason of the event that says: the content of a ready snapshot is gone.
pub const SNAPSHOT_CONTENT_MISSING: &str = "SnapshotContentMissing";
/// Reason of the event that says: the content of a snapshot could not be deleted.
pub const SNAPSHOT_CONTENT_OBJECT_DELETE_ERROR: &str = "SnapshotContentObjectDeleteError";
/// Reason of the event that says: the driver has taken a snapshot.
pub const SNAPSHOT_CREATED: &str = "SnapshotCreated";
/// Reason of the event that says: the driver could not take a snapshot.
pub const SNAPSHOT_CREATION_FAILED: &str = "SnapshotCreationFailed";
/// Reason of the event that says: the driver could not delete a snapshot.
pub const SNAPSHOT_DELETE_ERROR: &str = "SnapshotDeleteError";
/// Reason of the event that says: a snapshot that is being restored from waits to be deleted.
pub const SNAPSHOT_DELETE_PENDING: &str = "SnapshotDeletePending";
/// Reason of the event that says: the content of a snapshot belongs to another.
pub const SNAPSHOT_MISBOUND: &str = "SnapshotMisbound";
/// Reason of the event that says: the driver says how far a snapshot is.
pub const SNAPSHOT_PROGRESS: &str = "SnapshotProgress";
/// Reason of the event that says: a snapshot can be restored from.
pub const SNAPSHOT_READY: &str = "SnapshotReady";
/// Reason of the event that says: a snapshot names no source, or two.
pub const SNAPSHOT_VALIDATION_ERROR: &str = "SnapshotValidationError";
/// Reason of the event that says: a pod of a DaemonSet ended and is replaced.
pub const SUCCEEDED_DAEMON_POD: &str = "SucceededDaemonPod";
/// Reason of the event that says: a volume is attached to the pod's node.
pub const SUCCESSFUL_ATTACH_VOLUME: &str = "SuccessfulAttachVolume";
/// Reason of the event that says: a workload has created a pod or a claim.
pub const SUCCESSFUL_CREATE: &str = "SuccessfulCreate";
/// Reason of the event that says: a workload has deleted a pod.
pub const SUCCESSFUL_DELETE: &str = "SuccessfulDelete";
/// Reason of the event that says: a StatefulSet has restored a pod's labels.
pub const SUCCESSFUL_UPDATE: &str = "SuccessfulUpdate";
/// Reason of the event that says: a Job stops until it is resumed.
pub const SUSPENDED: &str = "Suspended";
/// Reason of the event that says: a CronJob has missed so many times that only the last one counts.
pub const TOO_MANY_MISSED_TIMES: &str = "TooManyMissedTimes";
/// Reason of the event that says: more pods of a Job succeeded than were asked for.
pub const TOO_MANY_SUCCEEDED_PODS: &str = "TooManySucceededPods";
/// Reason of the event that says: a CronJob owns a Job that it did not make, or forgot.
pub const UNEXPECTED_JOB: &str = "UnexpectedJob";
/// Reason of the event that says: this machine does not know the time zone of a CronJob.
pub const UNKNOWN_TIME_ZONE: &str = "UnknownTimeZone";
/// Reason of the event that says: a PodDisruptionBudget is about pods that no controller has.
pub const UNMANAGED_PODS: &str = "UnmanagedPods";
/// Reason of the event that says: the schedule of a CronJob cannot be read.
pub const UNPARSEABLE_SCHEDULE: &str = "UnparseableSchedule";
/// Reason of the event that says: the driver reports that something is wrong with a volume.
pub const VOLUME_CONDITION_ABNORMAL: &str = "VolumeConditionAbnormal";
/// Reason of the event that says: nothing is wrong with a volume any more.
pub const VOLUME_CONDITION_NORMAL: &str = "VolumeConditionNormal";
/// Reason of the event that says: a released volume could not be deleted.
pub const VOLUME_FAILED_DELETE: &str = "VolumeFailedDelete";
/// Reason of the event that says: a released volume could not be emptied.
pub const VOLUME_FAILED_RECYCLE: &str = "VolumeFailedRecycle";
/// Reason of the event that says: a volume's mode is not the one that the claim asks for.
pub const VOLUME_MISMATCH: &str = "VolumeMismatch";
/// Reason of the event that says: the driver is asked to modify a volume.
pub const VOLUME_MODIFY: &str = "VolumeModify";
/// Reason of the event that says: a modification is no longer asked for.
pub const VOLUME_MODIFY_CANCELED: &str = "VolumeModifyCanceled";
/// Reason of the event that says: a volume could not be modified.
pub const VOLUME_MODIFY_FAILED: &str = "VolumeModifyFailed";
/// Reason of the event that says: a volume is modified.
pub const VOLUME_MODIFY_SUCCESSFUL: &str = "VolumeModifySuccessful";
/// Reason of the event that says: a released volume is empty again.
pub const VOLUME_RECYCLED: &str = "VolumeRecycled";
/// Reason of the event that says: a volume could not be expanded.
pub const VOLUME_RESIZE_FAILED: &str = "VolumeResizeFailed";
/// Reason of the event that says: a volume is expanded.
pub const VOLUME_RESIZE_SUCCESSFUL: &str = "VolumeResizeSuccessful";
/// Reason of the event that says: a claim waits for a pod that uses it.
pub const WAIT_FOR_FIRST_CONSUMER: &str = "WaitForFirstConsumer";
/// Reason of the event that says: a claim waits for its pod to be scheduled.
pub const WAIT_FOR_POD_SCHEDULED: &str = "WaitForPodScheduled";
/// A node joined the cluster.
pub const REGISTERED_NODE: &str = "RegisteredNode";
/// A node left the cluster.
pub const REMOVING_NODE: &str = "RemovingNode";
/// A pod leaves its node because of a taint, or stays after all.
pub const TAINT_MANAGER_EVICTION: &str = "TaintManagerEviction";
