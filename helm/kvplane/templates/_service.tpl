{{/* Variables of the service: values that differ by pod, and secrets, which are never in a ConfigMap. */}}
{{- define "kvplane.serviceEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: KVPLANE_ADVERTISE
  value: {{ printf "$(POD_NAME).%s-headless.%s.svc.%s:%d" (include "kvplane.fullname" .) .Release.Namespace .Values.clusterDomain (int .Values.ports.grpc) | quote }}
{{- if dig "limits" "memory" "" .Values.resources }}
- name: KVPLANE_MEMORY_BYTES
  valueFrom: {resourceFieldRef: {resource: limits.memory}}
{{- end }}
{{- with .Values.store.external }}
{{- if and .existingSecret .usernameKey }}
- name: KVPLANE_STORE_USERNAME
  valueFrom: {secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .usernameKey | quote }}}}
{{- end }}
{{- if and .existingSecret .passwordKey }}
- name: KVPLANE_STORE_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .passwordKey | quote }}}}
{{- end }}
{{- end }}
{{- if eq .Values.store.type "builtin" }}
- name: KVPLANE_STORE_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "kvplane.valkeySecret" . | quote }}, key: {{ .Values.store.builtin.passwordKey | quote }}}}
{{- end }}
{{- if .Values.tracing.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .Values.tracing.endpoint | quote }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: {{ printf "k8s.namespace.name=%s,k8s.pod.name=$(POD_NAME)" .Release.Namespace | quote }}
{{- with .Values.tracing.ratio }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvplane.serviceMounts" -}}
{{- $dir := include "kvplane.dir" . -}}
- {name: config, mountPath: "{{ $dir }}/config", readOnly: true}
- {name: tmp, mountPath: /var/tmp}
{{- if eq .Values.store.type "sqlite" }}
- {name: store, mountPath: /var/lib/kvplane}
{{- end }}
{{- if include "kvplane.storeFiles" . }}
- {name: store-tls, mountPath: "{{ $dir }}/store", readOnly: true}
{{- end }}
{{- if include "kvplane.sealSecret" . }}
- {name: store-keys, mountPath: "{{ $dir }}/store-keys", readOnly: true}
{{- end }}
{{- if include "kvplane.lease" . }}
- {name: account, mountPath: "{{ $dir }}/account", readOnly: true}
{{- end }}
{{- if .Values.peerServices.existingSecret }}
- {name: peers, mountPath: "{{ $dir }}/peers", readOnly: true}
{{- end }}
{{- include "kvplane.serverMounts" . }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Files by which calls are admitted, for the service and the router; each line begins with a line end. */}}
{{- define "kvplane.serverMounts" -}}
{{- $dir := include "kvplane.dir" . -}}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: "{{ $dir }}/tls", readOnly: true}
{{- if ne .Values.tls.clientAuth "none" }}
- {name: client-ca, mountPath: "{{ $dir }}/client-ca", readOnly: true}
{{- end }}
{{- end }}
{{- if and .Values.metrics.enabled .Values.metrics.token.existingSecret }}
- {name: metrics-token, mountPath: "{{ $dir }}/metrics", readOnly: true}
{{- end }}
{{- if include "kvplane.auth" . }}
- {name: auth, mountPath: "{{ $dir }}/auth", readOnly: true}
{{- end }}
{{- end }}

{{- define "kvplane.serverVolumes" -}}
{{- if .Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "kvplane.tlsSecret" . | quote }}, defaultMode: 0440}
{{- if ne .Values.tls.clientAuth "none" }}
- name: client-ca
  secret:
    secretName: {{ .Values.tls.clientCA.existingSecret | default (include "kvplane.tlsSecret" .) | quote }}
    items: [{key: {{ .Values.tls.clientCA.key | quote }}, path: {{ .Values.tls.clientCA.key | quote }}}]
{{- end }}
{{- end }}
{{- if and .Values.metrics.enabled .Values.metrics.token.existingSecret }}
- name: metrics-token
  secret:
    secretName: {{ .Values.metrics.token.existingSecret | quote }}
    defaultMode: 0440
    items: [{key: {{ .Values.metrics.token.key | quote }}, path: token}]
{{- end }}
{{- if include "kvplane.auth" . }}
- name: auth
  secret: {secretName: {{ .Values.auth.existingSecret | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "kvplane.serviceVolumes" -}}
- name: config
  configMap: {name: {{ include "kvplane.configName" (include "kvplane.serviceConfig" . | fromYaml | merge (dict "root" $)) | quote }}}
- name: tmp
  emptyDir: {}
{{- with include "kvplane.storeFiles" . }}
- name: store-tls
  secret:
    secretName: {{ $.Values.store.external.existingSecret | quote }}
    defaultMode: 0440
    items: {{- . | nindent 6 }}
{{- end }}
{{- with include "kvplane.sealSecret" . }}
- name: store-keys
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
    items: [{key: {{ $.Values.store.sealing.key | quote }}, path: keys}]
{{- end }}
{{- if include "kvplane.lease" . }}
- name: account
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- with .Values.peerServices }}
{{- if .existingSecret }}
- name: peers
  secret: {secretName: {{ .existingSecret | quote }}, defaultMode: 0440, items: [{key: {{ .key | quote }}, path: token}]}
{{- end }}
{{- end }}
{{- include "kvplane.serverVolumes" . }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Files of the store's TLS: which keys of the secret become which files. */}}
{{- define "kvplane.storeFiles" -}}
{{- with .Values.store.external }}
{{- if .caKey }}
- {key: {{ .caKey | quote }}, path: ca.crt}
{{- end }}
{{- if .certKey }}
- {key: {{ .certKey | quote }}, path: tls.crt}
- {key: {{ .keyKey | quote }}, path: tls.key}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvplane.serviceContainer" -}}
name: kvplane
image: {{ include "kvplane.image" (dict "root" . "image" .Values.image) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [serve, "--config={{ include "kvplane.dir" . }}/config/config.yaml"]
env: {{- include "kvplane.serviceEnv" . | nindent 2 }}
ports:
  - {name: grpc, containerPort: {{ int .Values.ports.grpc }}}
  - {name: health, containerPort: {{ int .Values.ports.health }}}
  {{- if .Values.metrics.enabled }}
  - {name: metrics, containerPort: {{ int .Values.ports.metrics }}}
  {{- end }}
# Live while the store is read, ready afterwards until the service drains.
startupProbe:
  grpc: {port: {{ int .Values.ports.health }}, service: liveness}
  {{- toYaml .Values.probes.startup | nindent 2 }}
livenessProbe:
  grpc: {port: {{ int .Values.ports.health }}, service: liveness}
  {{- toYaml .Values.probes.liveness | nindent 2 }}
readinessProbe:
  grpc: {port: {{ int .Values.ports.health }}, service: readiness}
  {{- toYaml .Values.probes.readiness | nindent 2 }}
# Sessions opened while load balancers still list the pod are served. SIGTERM notifies open sessions.
lifecycle:
  preStop:
    exec:
      command: [sleep, "{{ int .Values.drain.preStopSeconds }}"]
securityContext: {{- toYaml .Values.securityContext | nindent 2 }}
resources: {{- toYaml .Values.resources | nindent 2 }}
volumeMounts: {{- include "kvplane.serviceMounts" . | nindent 2 }}
{{- end }}

{{/* Best-effort spread of one component: dict "root" $ "component" "service" */}}
{{- define "kvplane.topologySpread" -}}
{{- $component := . -}}
{{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "kvplane.selector" $component | nindent 6 }}
{{- end }}
{{- end }}
